# shellcheck shell=bash
# Makes one source file of several; sourced by the scripts that compile units or fuzzers.

# write_group FILE UNITS...    writes several sources as one: everything that they include, then each in its own namespace.
# The includes that they share are compiled once, so this takes less than half the time. A source with a main is a program;
# the group acts as this program when it is started under its name.
write_group() {
    local file=$1 unit name
    shift
    mkdir -p "$(dirname "$file")"
    {
        # includes within #if stay where they are
        awk '/^#[ \t]*if/ { depth++ } /^#[ \t]*endif/ { depth-- }
             /^#include/ && !depth && !seen[$2]++ { print ($2 ~ /^</ ? 0 : 1) "\t" $0 }' "$@" | sort -s -t$'\t' -k1,1n | cut -f2
        for unit in "$@"; do
            name=$(basename "${unit%.*}")
            printf 'namespace %s_source {\n#include "%s"\n}  // namespace\n' "$name" "$unit"
            ! grep -q '^int main(' "$unit" || printf 'const bool is_%s = is_also("%s", %s_source::main);\n' "$name" "$name" "$name"
        done
    } >"$file.new"
    if cmp -s "$file.new" "$file"; then rm "$file.new"; else mv "$file.new" "$file"; fi
}
