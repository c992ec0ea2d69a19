# train_gpt pre-trains GPT-style models. The targets:
#
#   make                   builds ./train_gpt for the device found here
#   make quickstart        trains a small model for two minutes on text found here
#   make test              builds and runs the tests (UNIT=norm: one)
#   make test-all          test plus the program on a simulated GPU, sanitizers,
#                          fuzzers, crashes and compiling for GPUs
#   make soak              longer runs and random faults, for an hour
#   make bench             bench-kernels and bench-train
#   make bench-kernels     each kernel (KERNELS="attention norm": some)
#   make bench-train       whole models, also in PyTorch if it is installed
#   make bench-parallel    communication between ranks: cost, and share hidden
#   make bench-checkpoint  how long saving and loading take
#   make bench-tables      what tables on disk add to the time of a step
#   make bench-optimizers  AdamW, LAMB and Muon on the same text
#   make bench-plan        planned and measured step times
#   make bench-timings     the overhead of recording the ranks' times
#   make bench-counts      kernels' work for each unit of a GPU, without a GPU
#   make calibrate-planner planned and published step times
#   make dist              packs the program for copying to other machines
#   make info              shows what was found here, and how to override it
#   make deps              installs the packages that are missing
#   make format            formats the source
#   make clean             deletes what was built
#   make help              shows this table
#
# DEVICE=cpu, cuda or simt chooses a device; TEXT=path names the text of quickstart;
# QUICK=1 compiles faster, but the program trains more slowly.

# ----------------------------------------------------------------------------------------------------------
# choices

NVCC ?= $(or $(shell command -v nvcc 2>/dev/null),$(wildcard /usr/local/cuda/bin/nvcc))
GPU  := $(if $(wildcard /dev/nvidia0 /dev/nvidiactl),yes)

ifndef DEVICE
ifeq ($(and $(NVCC),$(GPU)),)
DEVICE := cpu
why    := $(if $(NVCC),no GPU found here,no nvcc found here)
else
DEVICE := cuda
why    := nvcc and a GPU found here
endif
endif
ifeq ($(filter cuda cpu simt,$(DEVICE)),)
$(error DEVICE=$(DEVICE): not a device; give cuda, cpu or simt)
endif

PRECISION ?= $(if $(filter cuda,$(DEVICE)),bf16,fp32)
ifeq ($(filter bf16 fp32,$(PRECISION)),)
$(error PRECISION=$(PRECISION): not a precision; give bf16 or fp32)
endif
ifeq ($(DEVICE)-$(PRECISION),cpu-bf16)
$(error PRECISION=bf16: a CPU trains in fp32; leave PRECISION out, or give DEVICE=cuda or DEVICE=simt)
endif

COMM ?= $(if $(filter cuda,$(DEVICE)),nccl,mpi)
ifeq ($(filter nccl mpi,$(COMM)),)
$(error COMM=$(COMM): no way for processes to talk; give nccl or mpi)
endif
ifeq ($(COMM)-$(filter cuda,$(DEVICE)),nccl-)
$(error COMM=nccl: NCCL joins GPUs; leave COMM out, or give DEVICE=cuda)
endif

CXX      := $(if $(filter default,$(origin CXX)),g++,$(CXX))
dist     := $(filter dist,$(MAKECMDGOALS))# a packed program runs on other machines, so it is built separately
CPU_ARCH ?= $(if $(filter cuda,$(DEVICE))$(dist),x86-64-v3,native)
GPU_ARCH ?= 80 90a# 90 means 90a: without the a, Hopper's own instructions are not available
# On cards newer than all of GPU_ARCH, the driver compiles the PTX of its last architecture without a suffix (a, f). If that
# is sm_8x, nvcc compiles it now for the newer cards in this machine that it knows.
architectures = $(patsubst 90,90a,$(GPU_ARCH))
portable      = $(lastword $(filter-out %a %f,$(architectures)))
cards_here    = $(filter $(shell nvidia-smi --query-gpu=compute_cap --format=csv$(comma)noheader 2>/dev/null | tr -d .), \
                    $(patsubst compute_%,%,$(shell $(NVCC) --list-gpu-arch 2>/dev/null)))
newer         = $(if $(dist),,$(if $(filter 8%,$(portable)), \
                    $(filter-out 5% 6% 7% 8% 9% $(patsubst %f,%,$(architectures:a=)),$(cards_here))))
MPI      ?= on
ifeq ($(DEVICE)-$(COMM)-$(MPI),cuda-mpi-off)
$(error COMM=mpi MPI=off: one excludes the other; leave one out)
endif
MPICXX   ?= mpicxx
NCCL     ?= -lnccl
cores    := $(shell nproc)
# Without -j, the program's objects are compiled in parallel. So are the programs of tests, but by test/run.sh. While Make 4.3
# reads this, only the environment has the -j of a make that called this one.
ifeq ($(filter-out all quickstart dist,$(MAKECMDGOALS))$(filter -j%,$(MAKEFLAGS) $(shell echo "$$MAKEFLAGS")),)
MAKEFLAGS += -j$(cores)
endif
# instructions for products in bf16 that this processor has
flags     = $(shell sed -n 's/^flags.*: //p;T;q' /proc/cpuinfo 2>/dev/null)
cpu_bf16  = $(strip $(if $(filter avx512_bf16,$(flags)),bf16 dot products) $(if $(filter amx_bf16,$(flags)),AMX))
# when Linux gives large arrays pages of 2 MiB: always, madvise (only if asked, and the program asks) or never
huge_pages = $(shell sed -n 's/.*\[\(.*\)\].*/\1/p' /sys/kernel/mm/transparent_hugepage/enabled 2>/dev/null)
staged   := $(if $(filter cuda-mpi,$(DEVICE)-$(COMM)),yes)# GPUs that talk through host memory and MPI
ifneq ($(filter-out address thread,$(SANITIZE)),)
$(error SANITIZE=$(SANITIZE): not a sanitizer; give address, which brings undefined, or thread)
endif
ifneq ($(and $(SANITIZE),$(filter-out cpu,$(DEVICE))),)
$(error SANITIZE=$(SANITIZE): sanitizers see the code of the host only; give DEVICE=cpu)
endif
build    := $(or $(SANITIZE),$(DEVICE)-$(PRECISION)$(if $(staged),-mpi)$(if $(dist),-$(CPU_ARCH)))
BUILD    := build/$(build)
# objects that depend on neither device nor precision, and generated files
shared   := build/shared$(if $(filter-out native,$(CPU_ARCH)),-$(CPU_ARCH))

# ----------------------------------------------------------------------------------------------------------
# how each device is compiled and linked

ifeq ($(MPI),on)
# without MPI's own C++ interface: it is not used, and newer versions have none
mpi_compile := $(shell $(MPICXX) --showme:compile 2>/dev/null) -DOMPI_SKIP_MPICXX
mpi_link    := $(filter-out -lmpi_cxx,$(shell $(MPICXX) --showme:link 2>/dev/null))
else
mpi_compile := -DWITHOUT_MPI
mpi_link    :=
endif

empty :=
comma := ,
hash  := \#
# a b c as a,b,c
list   = $(subst $(empty) $(empty),$(comma),$(strip $(1)))

precision_fp32 :=
precision_bf16 := -DPRECISION_BF16
cuda_include := $(if $(NVCC),$(dir $(NVCC))../include)
includes := -I. -I$(shared) $(patsubst -I%,-isystem %,$(mpi_compile)) $(CPPFLAGS)
defines  := $(precision_$(PRECISION)) $(if $(staged),-DCOMM_MPI)
# -Wno-restrict: GCC 12 reports an overlap in std::string's operator+ that does not exist (its bug 105651).
# -Werror=switch: a value added to an enum must be added to every switch over it.
# STRICT=1 turns warnings into errors, and has ptxas report each kernel's registers and local memory, for check_cuda.sh.
warnings := -Wall -Wextra -Wno-restrict -Werror=switch $(if $(STRICT),-Werror)
# -g1: as much as a stack trace needs; more makes compiling take a third longer
# GCC collects garbage whenever its heap has doubled, which takes a tenth of its time and frees a quarter of the memory.
# ggc-min-heapsize delays that until all compilers together use a third of this machine's memory.
garbage  := $(if $(findstring clang,$(CXX)),,$(addprefix --param=ggc-min-heapsize=,$(shell \
                awk -v cores="$$(nproc)" '/^MemTotal:/ { print int($$2 / 3 / cores) }' /proc/meminfo 2>/dev/null)))
host     := -std=c++20 -g1 $(garbage) -fno-math-errno -fno-trapping-math -march=$(CPU_ARCH) -fopenmp $(warnings) $(CXXFLAGS)

# compiles code that does not depend on the device
plain   := $(CXX) -x c++ $(if $(QUICK),-Og,-O1) $(host) $(includes)
ifeq ($(DEVICE),cpu)
# -O3 takes half as long again to compile, and only the kernels gain from it. These are the passes that matter to them:
# kernels are as fast as at -O3.
speed := -O1 -fstrict-aliasing -ftree-vectorize -fvect-cost-model=dynamic -finline-functions -finline-small-functions \
         --param max-inline-insns-auto=30 --param inline-min-speedup=15 -funswitch-loops -fpeel-loops -fsplit-loops \
         -fpredictive-commoning -fversion-loops-for-strides -ftree-pre -fgcse -fschedule-insns2 -fpeephole2 \
         -fexpensive-optimizations
ifneq ($(findstring clang,$(CXX)),)
speed := -O3
endif
ifneq ($(QUICK),)
speed := -Og
endif
compile := $(CXX) -x c++ $(speed) $(host) -DDEVICE_CPU $(defines) $(includes)
link    := $(CXX) -fopenmp
libs    := -ldnnl
# The linker generates the code of train_gpt.o, on all cores at once (link-time optimization): compiled in one piece, this
# object would take twice as long as commands.o beside it. At -Og and with clang that gains little.
ifeq ($(QUICK)$(SANITIZE)$(findstring clang,$(CXX)),)
late := -flto=auto -flto-compression-level=1
link += -flto=auto
endif
endif
# the command in `compile`, at another optimization level if one is given
compile_at = $(if $(1),$(subst $(speed),,$(compile)) $(1),$(compile))
# GCC gives false warnings about sanitized code, so they are not errors. OpenMP's library is not instrumented: the thread
# sanitizer checks only the threads of streams and readers. Leaks in Open MPI are recognized by their library, which
# therefore stays loaded (keep_libraries.o). Null and alignment checks would double the code; the address sanitizer finds
# null pointers anyway.
sanitize_address := -fsanitize=address,undefined -fno-sanitize=null,alignment -fno-sanitize-recover=undefined
sanitize_thread  := -fsanitize=thread -fno-openmp -Wno-unknown-pragmas
ifneq ($(SANITIZE),)
compile := $(filter-out -Werror,$(call compile_at,-O0)) $(sanitize_$(SANITIZE))
link    += $(filter -fsanitize%,$(sanitize_$(SANITIZE))) -rdynamic
objects := $(shared)/keep_libraries.o
endif
ifeq ($(DEVICE),simt)
# -fsanitize=thread only when compiling: the shim provides the functions that it calls at each memory access. The -fno
# options keep each load in the branch where it was written, because the shim checks every load.
compile := $(CXX) -x c++ -O2 $(host) -Wno-unknown-pragmas -fsanitize=thread -fno-tree-loop-im -fno-hoist-adjacent-loads \
           $(defines) -Itest/simt $(includes)
link    := $(CXX) -fopenmp
libs    := -ldnnl -lboost_context
objects := $(shared)/simt.o
endif
ifeq ($(DEVICE),cuda)
compile := $(NVCC) -x cu -std=c++20 -lineinfo --expt-relaxed-constexpr --extended-lambda --threads 0 \
           $(foreach arch,$(architectures),-gencode arch=compute_$(arch)$(comma)code=sm_$(arch)) \
           $(foreach arch,$(portable),-gencode arch=compute_$(arch)$(comma)code=compute_$(arch)) \
           $(foreach arch,$(newer),-gencode arch=compute_$(portable)$(comma)code=sm_$(arch)) \
           $(if $(STRICT),-Werror all-warnings -Xptxas -v) \
           -Xcompiler $(call list,-O3 $(garbage) -march=$(CPU_ARCH) -fno-math-errno -fno-trapping-math -fopenmp -Wall -Wextra -Wno-restrict -Werror=switch $(CXXFLAGS)) $(defines) $(includes)
link    := $(NVCC) -Xcompiler -fopenmp
libs    := -lcublasLt $(if $(staged),,$(NCCL))
endif
# nvcc does not know -Wl
to_linker = $(if $(filter cuda,$(DEVICE)),$(foreach flag,$(1),-Xlinker $(patsubst -Wl$(comma)%,%,$(flag))),$(1))
# A packed program finds its libraries in the folder lib beside it, wherever it is copied. --disable-new-dtags lets these
# libraries find theirs there too.
libs := $(call to_linker,-Wl$(comma)-rpath$(comma)'$$ORIGIN/lib') $(libs) -lxxhash -lpcre2-8 -lutf8proc -lz -ledit $(LDFLAGS) \
        $(call to_linker,$(mpi_link) -Wl$(comma)--disable-new-dtags)

# ----------------------------------------------------------------------------------------------------------
# things that must be installed: header or program, and the Debian package that has it

need_build := cxxopts.hpp=libcxxopts-dev nlohmann/json.hpp=nlohmann-json3-dev xxhash.h=libxxhash-dev pcre2.h=libpcre2-dev \
              utf8proc.h=libutf8proc-dev zlib.h=zlib1g-dev histedit.h=libedit-dev
need_build += $(if $(filter cuda,$(DEVICE)),cublasLt.h=libcublas-dev $(if $(staged),,nccl.h=libnccl-dev),dnnl.h=libdnnl-dev)
need_build += $(if $(filter on,$(MPI)),mpi.h=libopenmpi-dev)
need_test  := doctest/doctest.h=doctest-dev
need_simt  := boost/context/detail/fcontext.hpp=libboost-context-dev dnnl.h=libdnnl-dev
need_tools := $(CXX)=g++ $(if $(filter on,$(MPI)),mpirun=openmpi-bin)

has_header  = printf '$(hash)if !__has_include(<%s>)\n$(hash)error\n$(hash)endif\n' $(1) | $(CXX) -E -x c++ $(includes) \
              $(if $(filter cuda,$(DEVICE)),-I$(cuda_include)) - >/dev/null 2>&1
has_program = command -v $(1) >/dev/null 2>&1

part  = $(word $(1),$(subst =, ,$(2)))
# Shell commands that print the package of each missing header or program.
find_missing = $(foreach need,$(need_tools),$(call has_program,$(call part,1,$(need))) || echo $(call part,2,$(need));) \
               $(foreach need,$(1),$(call has_header,$(call part,1,$(need))) || echo $(call part,2,$(need));)

define require
@missing=$$($(call find_missing,$(1))); [ -z "$$missing" ] || { \
    echo "train_gpt: missing here: $$(echo $$missing); run 'make deps', or: apt-get install $$(echo $$missing)" >&2; exit 1; }
endef

# ----------------------------------------------------------------------------------------------------------
# the program

.DEFAULT_GOAL := all
.PHONY: all
all: say_device $(BUILD)/train_gpt
	@cmp -s $(BUILD)/train_gpt train_gpt || cp -f $(BUILD)/train_gpt train_gpt
	@echo "./train_gpt is built for $(DEVICE) in $(PRECISION)"

# the release of nvcc, such as 12.8
nvcc_release = $(shell $(NVCC) --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p')

.PHONY: say_device
say_device:
	@$(if $(why),echo "building for DEVICE=$(DEVICE): $(why)",true)
	@$(if $(and $(NVCC),$(filter cuda,$(DEVICE))),printf '12.8\n$(nvcc_release)\n' | sort -VC || echo "warning: \
	nvcc $(nvcc_release) is not supported: its kernels spill registers$(comma) and its cuBLASLt knows no Blackwell; give \
	NVCC=path of CUDA 12.8 or later",true)

# Code that does not depend on the device is compiled separately, once for all devices. If both objects have a function, the
# linker takes that of the first, in which kernels are fast.
commands := $(if $(SANITIZE),$(BUILD),$(shared))/commands.o $(shared)/source_hash.o
$(BUILD)/train_gpt: $(BUILD)/train_gpt.o $(commands) $(objects)
	$(link) $^ -o $@ $(libs)
$(shared)/commands.o: data/commands/commands.cu $(shared)/command | $(BUILD)/found-build $(shared)/report_page.h
	$(plain) -MMD -MP -c $< -o $@
vpath commands.cu data/commands

# Runs on the simulated device are short, so the program is compiled at -O1, which is quicker.
$(BUILD)/%.o: %.cu $(BUILD)/command | $(BUILD)/found-build
	$(call compile_at,$(if $(filter simt,$(DEVICE)),-O1)) $(late) -MMD -MP -c $< -o $@

ifeq ($(DEVICE),cuda)
# nvcc reads a program once for the host, and once for each architecture of cards, for which the code of the host would take most
# of the time. So only the kernels are included there; attention.cuh includes those of attention that the precision needs.
$(shared)/program.cu: FORCE
	@mkdir -p $(shared)
	@{ echo '$(hash)ifdef __CUDA_ARCH__'; printf '$(hash)include "%s"\n' $(filter-out kernels/attention_%,$(wildcard kernels/*.cuh)); \
	    printf '$(hash)else\n$(hash)include "train_gpt.cu"\n$(hash)endif\n'; } >$@.$$$$; \
	    if cmp -s $@.$$$$ $@; then rm $@.$$$$; else mv $@.$$$$ $@; fi
$(BUILD)/train_gpt.o: $(shared)/program.cu $(BUILD)/command | $(BUILD)/found-build
	$(compile) -MMD -MP -c $< -o $@
endif

# The page of `train_gpt report`, as a string in the program.
$(shared)/report_page.h: data/report/page.html
	@mkdir -p $(shared)
	@{ printf '$(hash)pragma once\nconstexpr char report_page[] = R"page('; cat $<; printf ')page";\n'; } >$@
$(BUILD)/found-build: $(shared)/report_page.h

# A hash of the sources of the program, which ranks compare when they start. It is in a separate object, so that a new hash
# recompiles nothing else.
sources := $(sort train_gpt.cu $(filter-out %.md,$(wildcard kernels/* comm/* data/*/*)))
$(shared)/source_hash.o: $(sources)
	@mkdir -p $(shared)
	@{ printf 'extern const char source_hash[];\nconst char source_hash[] = "'; cat $(sources) | sha256sum | cut -c-16 | tr '\n' '"'; echo ';'; } | \
	    $(CXX) -x c++ -c - -o $@

# Required headers and programs are checked again when this file changes, because it may name others.
$(BUILD)/found-%: Makefile
	$(call require,$(need_$*))
	@mkdir -p $(BUILD); touch $@

# Objects are made again when the command that makes them changes.
$(BUILD)/command: FORCE
	@mkdir -p $(BUILD)
	@echo '$(compile)' | cmp -s - $@ || echo '$(compile)' > $@
.PHONY: FORCE

-include $(wildcard $(BUILD)/*.d $(BUILD)/tests/*.d $(shared)/*.d)
.SECONDARY:

include test/tests.mk

# ----------------------------------------------------------------------------------------------------------
# first steps

TEXT          ?= /usr/include
PROMPT        ?= $(if $(filter /usr/include,$(TEXT)),typedef struct)
quick         := runs/quickstart
QUICK_SECONDS ?= 110# of training
QUICK_OPTIONS ?= --micro-batch 8 --learning-rate 3e-3
quick_train   := ./train_gpt train --model tiny --tokenizer $(quick)/text_tokenizer.json --train-data '$(quick)/text_train_*.bin'
quick_bf16    := $(if $(filter cpu,$(DEVICE)),$(if $(filter AMX,$(cpu_bf16)),,$(if $(cpu_bf16), --matmul-dtype bf16)))# with AMX, auto is bf16 already
# Prints how many steps fit into QUICK_SECONDS, a multiple of 20, from the median time of the last 10 steps of a short run.
# The time of 20 steps is left for the validations.
quick_steps   := sed -n 's/.*"loss".*"ms":\([0-9.e+-]*\).*/\1/p' $(quick)/rate/log.jsonl | tail -n 10 | sort -g | \
                 awk -v seconds=$(QUICK_SECONDS) '{ ms[NR] = $$1 } END { n = int(50 * seconds / ms[int((NR + 1) / 2)]) - 1; print 20 * (n > 5 ? n : 5) }'
.PHONY: quickstart
quickstart: deps
	@$(MAKE) --no-print-directory DEVICE=$(DEVICE)
	@mkdir -p $(quick)
	@echo "1. a vocabulary, and tokens, from the text in $(TEXT)"
	@./train_gpt tokenize $(TEXT) --output $(quick)/text --train-tokenizer 2048 --val-fraction 0.02 --overwrite
	@echo "2. twenty steps, to see how many fit into two minutes here"
	@$(quick_train) --run-dir $(quick)/rate --overwrite --quiet $(QUICK_OPTIONS) --steps 20
	@echo "3. training"
	@steps=$$($(quick_steps)); rm -rf $(quick)/rate; \
	$(quick_train) --val-data '$(quick)/text_val_*.bin' --run-dir $(quick)/run --overwrite --steps $$steps \
	    --log-every $$((steps / 20)) --val-every $$((steps / 4)) --val-batches 10 $(QUICK_OPTIONS)
	@echo "4. what it has learnt"
	@./train_gpt sample $(quick)/run --tokens 150 --samples 2 --temperature 0.8 --top-p 0.95 --prompt '$(PROMPT)'
	@printf '%s\n' "" "What to try next:" \
	    "  more text        ./train_gpt sample $(quick)/run --interactive" \
	    "  the curves       ./train_gpt report $(quick)/run" \
	    "  a larger model   $(quick_train) \\" \
	    "                     --layers 6 --channels 384 --heads 6 --mlp-width 1024 --micro-batch 8 --steps 2000 --run-dir runs/larger$(quick_bf16)" \
	    "  your own text    make quickstart TEXT=path" \
	    "  all options      ./train_gpt train --help" \
	    "  proof, speed     make test, make bench"

# ----------------------------------------------------------------------------------------------------------
# a folder to copy to other machines: the program and the libraries it needs

DIST   ?= dist
packed := $(DIST)/train_gpt-$(DEVICE)-$(CPU_ARCH)
# Libraries that a node already has: the C library, the GPU's driver, and Open MPI with the libraries that only it needs.
node_has := ld-linux|lib(c|m|dl|rt|pthread|resolv|util)\.so|lib(cuda|nvidia-ml)\.so|lib(mpi|open-)

# The README, and the pages that it links to.
pages  := $(wildcard *.md */*.md */*/*.md)

# Follows the names of needed libraries, starting at the program. $$1 is the file being searched.
.PHONY: dist
dist: $(BUILD)/train_gpt
	@rm -rf $(packed) $(packed).tar.gz; mkdir -p $(packed)/lib; cp --parents $(pages) LICENSE $(packed); cp $< $(packed); \
	places=$$(ldd $<); set -- $<; \
	while [ $$# -gt 0 ]; do \
	    for name in $$(readelf -d $$1 | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | grep -vE '^($(node_has))'); do \
	        [ ! -e $(packed)/lib/$$name ] || continue; \
	        place=$$(echo "$$places" | awk -v name=$$name '$$1 == name && $$3 ~ /^\// { print $$3 }'); \
	        [ -n "$$place" ] || { rm -rf $(packed); \
	            echo "train_gpt: dist: $$name: not found here; install it, or name its folder in LD_LIBRARY_PATH" >&2; exit 1; }; \
	        cp $$place $(packed)/lib/$$name; set -- "$$@" $$place; \
	    done; \
	    shift; \
	done
	@tar -C $(DIST) -czf $(packed).tar.gz $(notdir $(packed))
	@echo "$(packed).tar.gz: $$(du -h $(packed).tar.gz | cut -f1), with $$(ls $(packed)/lib | wc -l) libraries;" \
	    "a node needs $(if $(filter cuda,$(DEVICE)),a driver$(if $(mpi_link), and Open MPI,),$(if $(mpi_link),Open MPI,nothing else))"

# ----------------------------------------------------------------------------------------------------------
# detection

.PHONY: deps
deps:
	@missing=$$($(call find_missing,$(need_build) $(need_test) $(need_simt))); \
	[ -n "$$missing" ] || exit 0; \
	install="apt-get install -y --no-install-recommends $$(echo $$missing)"; \
	if ! command -v apt-get >/dev/null; then echo "train_gpt: missing here: $$(echo $$missing) (names of Debian packages); install them"; exit 1; fi; \
	if [ "$$(id -u)" = 0 ]; then sudo=; elif sudo -n true 2>/dev/null; then sudo=sudo; else echo "train_gpt: run: sudo $$install"; exit 1; fi; \
	echo "installing $$(echo $$missing)"; \
	{ $$sudo apt-get update && DEBIAN_FRONTEND=noninteractive $$sudo $$install; } >/tmp/train_gpt_deps.$$$$ 2>&1 || { \
	    cat /tmp/train_gpt_deps.$$$$; echo "train_gpt: could not install; run: $$install"; exit 1; }; \
	rm -f /tmp/train_gpt_deps.$$$$

show = @printf '%-12s %-62s %s\n' '$(1)' '$(2)' '$(3)'
# the path of a header, or "not found" and its package
where = $(or $(shell printf '$(hash)include <$(1)>\n' | $(CXX) -M -x c++ -std=c++20 $(includes) -I$(cuda_include) - 2>/dev/null | tr ' \\' '\n\n' | grep -m1 '/$(1)$$'),not found: package $(2))

.PHONY: info
info:
	$(call show,what,found here,to override)
	$(call show,device,$(DEVICE)$(if $(why), ($(why))),DEVICE=cuda|cpu|simt)
	$(call show,precision,$(PRECISION),PRECISION=bf16|fp32)
	$(call show,compiler,$(or $(shell $(CXX) --version 2>/dev/null | head -1),$(CXX) not found: package g++),CXX=clang++)
	$(call show,CPU,$(shell sed -n 's/model name.*: //p;T;q' /proc/cpuinfo)$(comma) $(cores) cores$(comma) code for $(CPU_ARCH),CPU_ARCH=x86-64-v3)
	$(call show,bf16 on CPU,$(or $(cpu_bf16),no products in bf16 here),--matmul-dtype bf16|fp32|auto)
	$(call show,huge pages,$(or $(huge_pages),none in this kernel),(the system: madvise or always are fine))
	$(call show,nvcc,$(or $(NVCC),not found)$(if $(NVCC), $(nvcc_release)$(comma) code for sm_$(subst $(empty) $(empty), sm_,$(strip $(GPU_ARCH) $(newer)))),NVCC=path GPU_ARCH="80 90a")
	$(call show,GPU,$(or $(shell nvidia-smi --query-gpu=name,driver_version --format=csv$(comma)noheader 2>/dev/null | head -1),none),)
	$(call show,cuBLASLt,$(call where,cublasLt.h,libcublas-dev),CPPFLAGS=-I... LDFLAGS=-L...)
	$(call show,NCCL,$(call where,nccl.h,libnccl-dev),CPPFLAGS=-I... LDFLAGS=-L... NCCL=-l:libnccl.so.2)
	$(call show,MPI,$(if $(filter off,$(MPI)),off,$(call where,mpi.h,libopenmpi-dev)),MPI=off MPICXX=path)
	$(call show,ranks talk,over $(if $(filter nccl,$(COMM)),NCCL,$(if $(filter off,$(MPI)),nothing: one process only,MPI)),$(if $(filter cuda,$(DEVICE)),COMM=nccl|mpi))
	$(call show,oneDNN,$(call where,dnnl.h,libdnnl-dev),CPPFLAGS=-I... LDFLAGS=-L...)
	$(call show,cxxopts,$(call where,cxxopts.hpp,libcxxopts-dev),CPPFLAGS=-I...)
	$(call show,JSON,$(call where,nlohmann/json.hpp,nlohmann-json3-dev),CPPFLAGS=-I...)
	$(call show,xxHash,$(call where,xxhash.h,libxxhash-dev),CPPFLAGS=-I... LDFLAGS=-L...)
	$(call show,PCRE2,$(call where,pcre2.h,libpcre2-dev),CPPFLAGS=-I... LDFLAGS=-L...)
	$(call show,utf8proc,$(call where,utf8proc.h,libutf8proc-dev),CPPFLAGS=-I... LDFLAGS=-L...)
	$(call show,zlib,$(call where,zlib.h,zlib1g-dev),CPPFLAGS=-I... LDFLAGS=-L...)
	$(call show,libedit,$(call where,histedit.h,libedit-dev),CPPFLAGS=-I... LDFLAGS=-L...)
	$(call show,doctest,$(call where,doctest/doctest.h,doctest-dev),(tests only))
	$(call show,Boost,$(call where,boost/context/detail/fcontext.hpp,libboost-context-dev),(tests only))

# The head of this file is the table.
.PHONY: help
help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

.PHONY: format
format:
	git ls-files -co --exclude-standard '*.cu' '*.cuh' '*.h' '*.cc' | xargs clang-format -i

.PHONY: clean
clean:
	rm -rf build dist train_gpt
