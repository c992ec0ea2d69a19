// Linked into sanitizer builds: libraries stay loaded, because suppressions identify leaks by their library.
extern "C" int dlclose(void*) {
    return 0;
}
