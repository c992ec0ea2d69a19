#!/usr/bin/env bash
# `make dist`: the packed folder works after it was moved, with an empty environment and its own libraries; and in a root that
# holds only the C library and Open MPI, with and without mpirun. The source also compiles without MPI.
# needs: cpu-fp32/train_gpt cpu-fp32/compare_runs
# seconds: 15
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
plan 25

without_mpi() {
    local compile
    compile=$(make --no-print-directory -n -B DEVICE=cpu MPI=off build/cpu-fp32/train_gpt.o | grep -o '^g++ .* -c train_gpt.cu' | sed 's/ -MMD -MP//') &&
        $compile -Werror -fsyntax-only
}
check "the program without MPI compiles" without_mpi

# Packs the program that is built already, to take only seconds; other machines would need CPU_ARCH=x86-64-v3.
pack() { make --no-print-directory DEVICE=cpu BUILD=build/cpu-fp32 CPU_ARCH=native DIST="$work/dist" "$@" dist; }
packed=$work/dist/train_gpt-cpu-native
check "make dist" pack
[ -s "$packed.tar.gz" ] || exit 1
check "the archive holds the folder" cmp <(tar -tzf "$packed.tar.gz" | grep -v '/$' | sort) \
    <(cd "$work/dist" && find train_gpt-cpu-native -type f | sort)

mkdir "$work/elsewhere"
tar -C "$work/elsewhere" -xzf "$packed.tar.gz"
rm -rf "$work/dist"
moved=$work/elsewhere/train_gpt-cpu-native

# uses NAME PLACE    the program loads the library from there
uses() { env -i ldd "$moved/train_gpt" | grep -q "^[[:space:]]*$1 => $2"; }
for name in "$moved"/lib/*; do
    name=${name##*/}
    check "$name is the packed one" uses "$name" "$moved/lib/$name"
done
check "the libraries that were asked for are there" ls "$moved"/lib/lib{dnnl,xxhash,stdc++,gcc_s,gomp}.so.*
check "Open MPI is the node's" uses 'libmpi[^ ]*' '/[^ ]*lib'
check "neither Open MPI nor the C library is packed" \
    test -z "$(find "$moved/lib" -name 'libmpi*' -o -name 'libopen-*' -o -name 'libc.*' -o -name 'libm.*' -o -name 'ld-*')"

cp -r kernels "$work/elsewhere/text"
tokenize=(tokenize text --output tokens --val-fraction 0.1)
train=(train --model tiny --layers 1 --channels 32 --heads 2 --context 32 --steps 2 --warmup-steps 0 --train-data 'tokens_train_*.bin')
cd "$work/elsewhere" || exit 1
check "tokenizes with no environment" env -i "$moved/train_gpt" "${tokenize[@]}"
check "trains with no environment" env -i "$moved/train_gpt" "${train[@]}" --run-dir plain
check "and leaves a checkpoint" test -e plain/checkpoints/*/index.bin
mv "$moved/lib/libxxhash.so.0" .
check "a library is not found by another way" env -i bash -c "! ldd '$moved/train_gpt' | grep -q 'libxxhash.*$moved'"
mv libxxhash.so.0 "$moved/lib/"
cd - >/dev/null || exit 1

fake() { # builds a program, and the library that it needs
    echo 'int nowhere() { return 1; }' | g++ -shared -fPIC -x c++ - -o "$work/libnowhere.so" -Wl,-soname,libnowhere.so &&
        echo 'int nowhere(); int main() { return nowhere(); }' | g++ -x c++ - -o "$work/needs/train_gpt" -L"$work" -lnowhere
}
mkdir "$work/needs"
fake && rm "$work/libnowhere.so"
make --no-print-directory -o "$work/needs/train_gpt" DEVICE=cpu BUILD="$work/needs" CPU_ARCH=native DIST="$work/dist" dist \
    >/dev/null 2>"$work/refused"
check "a library that is not here is refused" grep -q '^train_gpt: dist: libnowhere.so: not found' "$work/refused"
check "and leaves nothing" test ! -e "$packed" -a ! -e "$packed.tar.gz"

# ----------------------------------------------------------------------------------------------------------
# a bare node

plan 5
if ! command -v mpirun >/dev/null || ! unshare -m true 2>/dev/null; then
    skip "no mpirun here, or no file system can be mounted" 5
    exit
fi
root=$work/root
# take FILES...    copies files into the root, and the libraries that they need
take() {
    local file
    for file in "$@" $(ldd "$@" 2>/dev/null | grep -oE '/[^ :]+' | sort -u); do
        [ -e "$root$file" ] || { mkdir -p "$root$(dirname "$file")" && cp -L "$file" "$root$file"; }
    done
}
libmpi=$(ldd "$moved/train_gpt" | sed -nE 's/.*libmpi\.so[^ ]* => ([^ ]*).*/\1/p')
mkdir -p "$root"/{proc,sys,dev,tmp,etc,usr/{share,lib,lib64,bin}}
for folder in /lib /lib64 /bin; do [ ! -L $folder ] || cp -P $folder "$root/"; done
# shellcheck disable=SC2046  # a list of files
take "$(command -v mpirun)" "$libmpi" $(find "$(dirname "$libmpi")"/{openmpi,pmix2} -name 'mca_*.so' -o -name 'pmix_*.so' 2>/dev/null)
cp -rL /etc/passwd /etc/openmpi "$root/etc/" 2>/dev/null
cp -rL /usr/share/openmpi "$root/usr/share/" 2>/dev/null
mv "$work/elsewhere" "$root/elsewhere"

# on_node COMMAND...
on_node() {
    # shellcheck disable=SC2016  # it is the inner shell that expands
    unshare -m bash -c 'root=$1; shift; mount -t proc proc "$root/proc" && mount --rbind /sys "$root/sys" &&
        mount --rbind /dev "$root/dev" && cd "$root/elsewhere" &&
        exec env -i PATH=/usr/bin OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
            "$(command -v chroot)" "$root" "$@"' node "$root" "$@"
}
# train_there RUN LAUNCHER...
train_there() {
    on_node "${@:2}" /elsewhere/train_gpt-cpu-native/train_gpt \
        "${train[@]/tokens_train_*.bin//elsewhere/tokens_train_*.bin}" --run-dir "/elsewhere/$1"
}
check "a bare node has no library of ours" test -z "$(find "$root/usr" "$root/lib" -name 'libdnnl*' -o -name 'libgomp*' 2>/dev/null)"
check "trains on a bare node" train_there bare
check "to the same weights" build/cpu-fp32/compare_runs "$root/elsewhere/bare" "$root/elsewhere/plain" --bitwise
# isolated: the root has no ssh, which mpirun would look for
check "trains on a bare node under mpirun" train_there two mpirun "${mpirun_options[@]}" --mca plm isolated -np 2
check "and leaves a checkpoint there" test -e "$root"/elsewhere/two/checkpoints/*/index.bin
