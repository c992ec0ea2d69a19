// Linked into programs with sanitizers: no library is unloaded, for leaks are known by their libraries.
extern "C" int dlclose(void*) {
    return 0;
}
