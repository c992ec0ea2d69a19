# train_gpt: pre-training of GPT-style models. The targets:
#
#   make               build ./train_gpt for the device found here (make DEVICE=cuda|cpu|simt to choose)
#   make quickstart    train a small model on text found on this machine (TEXT=path for your own)
#   make test          build and run the tests; make test-all adds fuzzing, sanitizers and longer runs
#   make bench         measure speed: make bench-kernels each kernel, make bench-train whole models;
#                      make bench-parallel what several processes cost and hide, make bench-checkpoint
#                      what saving and loading take
#   make dist          pack the program with the libraries it needs, to be copied to other machines
#   make info          what was found here, and how to override it
#   make deps          install the packages that are missing
#   make format, make clean

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
dist     := $(filter dist,$(MAKECMDGOALS))# what is packed runs on other machines, and is built apart
CPU_ARCH ?= $(if $(filter cuda,$(DEVICE))$(dist),x86-64-v3,native)
GPU_ARCH ?= 80 90a# 90 is taken as 90a: without the a, a Hopper's own instructions are not to be had
MPI      ?= on
ifeq ($(DEVICE)-$(COMM)-$(MPI),cuda-mpi-off)
$(error COMM=mpi MPI=off: one excludes the other; leave one out)
endif
MPICXX   ?= mpicxx
NCCL     ?= -lnccl
cores    := $(shell nproc)
staged   := $(if $(filter cuda-mpi,$(DEVICE)-$(COMM)),yes)# GPUs that talk through host memory and MPI
BUILD    := build/$(DEVICE)-$(PRECISION)$(if $(staged),-mpi)$(if $(dist),-$(CPU_ARCH))

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
includes := -I. $(patsubst -I%,-isystem %,$(mpi_compile)) $(CPPFLAGS)
defines  := $(precision_$(PRECISION)) $(if $(staged),-DCOMM_MPI)
# GCC 12 sees an overlap that is not there in operator+ of std::string (its bug 105651): -Wno-restrict
# STRICT=1 makes errors of warnings, and of kernels that spill registers or keep arrays in local memory.
warnings := -Wall -Wextra -Wno-restrict $(if $(STRICT),-Werror)
# -g1: as much as a stack trace needs; more makes compiling a third longer
host     := -std=c++20 -g1 -fno-math-errno -fno-trapping-math -march=$(CPU_ARCH) -fopenmp $(warnings) $(CXXFLAGS)

ifeq ($(DEVICE),cpu)
compile := $(CXX) -x c++ -O3 $(host) -DDEVICE_CPU $(defines) $(includes)
link    := $(CXX) -fopenmp
libs    := -ldnnl
endif
ifeq ($(DEVICE),simt)
# -fsanitize=thread when compiling only: the shim supplies what it calls at each access to memory. A load stays in the
# branch it was written in, for the shim checks each one.
compile := $(CXX) -x c++ -O2 $(host) -Wno-unknown-pragmas -fsanitize=thread -fno-tree-loop-im -fno-hoist-adjacent-loads \
           $(defines) -Itest/simt $(includes)
link    := $(CXX) -fopenmp
libs    := -ldnnl -lboost_context
shim    := $(BUILD)/simt.o
endif
ifeq ($(DEVICE),cuda)
compile := $(NVCC) -x cu -std=c++20 -O3 -lineinfo --expt-relaxed-constexpr --extended-lambda --threads 0 \
           $(foreach arch,$(patsubst 90,90a,$(GPU_ARCH)),-gencode arch=compute_$(arch)$(comma)code=sm_$(arch)) \
           $(if $(STRICT),-Werror all-warnings -Xptxas -v) \
           -Xcompiler $(call list,-march=$(CPU_ARCH) -fno-math-errno -fno-trapping-math -fopenmp -Wall -Wextra -Wno-restrict $(CXXFLAGS)) $(defines) $(includes)
link    := $(NVCC) -Xcompiler -fopenmp
libs    := -lcublasLt $(if $(staged),,$(NCCL))
endif
# nvcc does not know -Wl
to_linker = $(if $(filter cuda,$(DEVICE)),$(foreach flag,$(1),-Xlinker $(patsubst -Wl$(comma)%,%,$(flag))),$(1))
# A packed program finds its libraries in the folder lib beside it, wherever it was copied to. With
# --disable-new-dtags they find theirs there too.
libs := $(call to_linker,-Wl$(comma)-rpath$(comma)'$$ORIGIN/lib') $(libs) -lxxhash -lpcre2-8 -lutf8proc -lz $(LDFLAGS) \
        $(call to_linker,$(mpi_link) -Wl$(comma)--disable-new-dtags)

# ----------------------------------------------------------------------------------------------------------
# what must be installed: header or program, and the Debian package that has it

need_build := cxxopts.hpp=libcxxopts-dev nlohmann/json.hpp=nlohmann-json3-dev xxhash.h=libxxhash-dev pcre2.h=libpcre2-dev \
              utf8proc.h=libutf8proc-dev zlib.h=zlib1g-dev
need_build += $(if $(filter cuda,$(DEVICE)),cublasLt.h=libcublas-dev $(if $(staged),,nccl.h=libnccl-dev),dnnl.h=libdnnl-dev)
need_build += $(if $(filter on,$(MPI)),mpi.h=libopenmpi-dev)
need_test  := doctest/doctest.h=doctest-dev
need_simt  := boost/context/detail/fcontext.hpp=libboost-context-dev dnnl.h=libdnnl-dev
need_tools := $(CXX)=g++ $(if $(filter on,$(MPI)),mpirun=openmpi-bin)

has_header  = printf '$(hash)if !__has_include(<%s>)\n$(hash)error\n$(hash)endif\n' $(1) | $(CXX) -E -x c++ $(includes) \
              $(if $(filter cuda,$(DEVICE)),-I$(cuda_include)) - >/dev/null 2>&1
has_program = command -v $(1) >/dev/null 2>&1

part  = $(word $(1),$(subst =, ,$(2)))
# Shell commands that print the package of each thing that is missing.
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
all: $(if $(why),say_device) $(BUILD)/train_gpt
	@cmp -s $(BUILD)/train_gpt train_gpt || cp -f $(BUILD)/train_gpt train_gpt
	@echo "./train_gpt is built for $(DEVICE) in $(PRECISION)"

.PHONY: say_device
say_device:
	@echo "building for DEVICE=$(DEVICE): $(why)"

$(BUILD)/train_gpt: $(BUILD)/train_gpt.o $(shim)
	$(link) $^ -o $@ $(libs)

$(BUILD)/%.o: %.cu $(BUILD)/command | $(BUILD)/found-build
	$(compile) -MMD -MP -c $< -o $@

$(BUILD)/found-%:
	$(call require,$(need_$*))
	@mkdir -p $(BUILD); touch $@

# Objects are made again when the command that makes them changes.
$(BUILD)/command: FORCE
	@mkdir -p $(BUILD)
	@echo '$(compile)' | cmp -s - $@ || echo '$(compile)' > $@
.PHONY: FORCE

-include $(wildcard $(BUILD)/*.d)
.SECONDARY:

# ----------------------------------------------------------------------------------------------------------
# tests. A suite is a program built from test/test_*.cu, for a device and a precision, or a script test/*.sh.

# the largest first, for they take longest to compile
all_units := $(filter-out test_main test_ranks_main,$(basename $(notdir $(shell ls -S test/test_*.cu))))
host_only := test_data test_sample_order test_tokenize test_options test_compare_runs test_meter test_generation test_evaluation \
             test_bpe test_bpe_training test_hf_tokenizer test_tokenizer test_megatron test_blend test_choices test_hf_models \
             test_data_report test_batch_reader test_text_documents test_sampler test_pipeline_schedule test_pipeline_layers \
             test_parameters test_safetensors test_llmc test_checkpoint_index test_checkpoint_files test_inspect test_resume test_run_log
not_cpu   := test_simt test_simt_errors test_simt_grid_errors test_simt_hopper_errors test_ptx test_ptx_hopper \
             test_attention_hopper test_product_tuning test_graph
# Of the simulated device, what knows no precision, the whole model, and what ranks do with the kernels, is tried in bf16
# only: there weights and master weights are two things. In fp32 whole runs follow those of the CPU (check_runs.sh).
not_simt  := $(host_only) test_mesh test_node_reader test_layouts \
             $(if $(filter fp32,$(PRECISION)),$(not_cpu) test_model test_collectives test_transport test_zero test_tensor_parallel test_pipeline \
             test_checkpoints)
not_cuda  := test_simt test_simt_errors test_simt_grid_errors test_simt_hopper_errors test_host_cuda
# Units that test/run.sh starts with mpirun, once for each of these numbers of ranks.
with_ranks := test_collectives test_transport test_mesh test_zero test_node_reader test_tensor_parallel test_pipeline \
              test_layouts test_checkpoints test_product_tuning
ranks_test_collectives     := $(if $(filter simt,$(DEVICE)),3,1 2 3 4)
ranks_test_transport       := $(if $(filter simt,$(DEVICE)),3,1 2 3 4)
ranks_test_mesh            := 1 2 3 4 6
ranks_test_node_reader     := 1 2 4
ranks_test_zero            := $(if $(filter simt,$(DEVICE)),2,1 2 4)
ranks_test_tensor_parallel := $(if $(filter simt,$(DEVICE)),2,1 2 4)
ranks_test_pipeline        := $(if $(filter simt,$(DEVICE)),2,1 2 4)
ranks_test_layouts         := 2 4
ranks_test_product_tuning  := $(if $(filter simt,$(DEVICE)),2,1 2)
ranks_test_checkpoints     := $(if $(filter simt,$(DEVICE)),2,1 2 4)
# LEAVE_OUT=test_x: builds the units without it
units     := $(filter-out $(LEAVE_OUT) $(not_$(DEVICE)) $(if $(filter off,$(MPI)),$(with_ranks)),$(all_units))

.PHONY: units device_units
units: $(units:%=$(BUILD)/%)
# those that run something on the device
device_units: $(patsubst %,$(BUILD)/%,$(filter-out $(host_only),$(units)))

$(BUILD)/test_%: $(BUILD)/test_%.o $(BUILD)/test_main.o $(shim)
	$(link) $^ -o $@ $(libs)

$(with_ranks:%=$(BUILD)/%): $(BUILD)/test_%: $(BUILD)/test_%.o $(BUILD)/test_ranks_main.o $(shim) $(BUILD)/test_%.ranks
	$(link) $(filter %.o,$^) -o $@ $(libs)

$(BUILD)/test_%.ranks: Makefile
	@mkdir -p $(BUILD)
	@echo $(ranks_test_$*) > $@

# Suites without kernels, and those of whole steps of tiny models, are compiled more quickly.
quickly = $(if $(filter $(1),$(host_only)),-Og,$(if $(filter $(1),test_zero test_layouts test_checkpoints test_model test_graph),-O1))
$(BUILD)/test_%.o: test/test_%.cu $(BUILD)/command | $(BUILD)/found-build $(BUILD)/found-test
	$(compile) $(if $(filter cuda,$(DEVICE)),,$(call quickly,test_$*)) -MMD -MP -c $< -o $@

# The shim is not instrumented: it is what the instrumentation calls.
$(BUILD)/simt.o: test/simt/simt.cc $(BUILD)/command | $(BUILD)/found-simt
	$(filter-out -fsanitize=thread,$(compile)) -MMD -MP -c $< -o $@

# the longest first: they run side by side
more_checks := sanitizers cuda crashes layouts bench failures damage fuzzers transformers llmc reshard dist source

# besides the units
tested := train_gpt compare_runs forge_checkpoint reshard fault_injection.so

.PHONY: test test-all
test: deps
	@$(MAKE) --no-print-directory -j$(cores) built-cpu built-simt-fp32 built-simt-bf16
	@test/run.sh cpu-fp32 simt-fp32 simt-bf16 test/check_bad_input.sh test/check_runs.sh test/check_text.sh

# What takes longest to compile goes first, and one build goes on where another has nothing left to do.
.PHONY: built-cpu built-simt-fp32 built-simt-bf16
built-cpu:
	@+$(MAKE) --no-print-directory DEVICE=cpu $(tested:%=build/cpu-fp32/%) units
built-simt-fp32:
	@+$(MAKE) --no-print-directory DEVICE=simt PRECISION=fp32 build/simt-fp32/train_gpt units
built-simt-bf16:
	@+$(MAKE) --no-print-directory DEVICE=simt PRECISION=bf16 units

test-all: deps
	@EXTRA="$(more_checks:%=test/check_%.sh)" $(MAKE) --no-print-directory test

# ----------------------------------------------------------------------------------------------------------
# first steps

TEXT          ?= /usr/include
PROMPT        ?= $(if $(filter /usr/include,$(TEXT)),typedef struct)
quick         := runs/quickstart
QUICK_OPTIONS ?= --steps 1200 --micro-batch 8 --learning-rate 3e-3 --val-every 300 --val-batches 40 --log-every 50
.PHONY: quickstart
quickstart: deps
	@$(MAKE) --no-print-directory DEVICE=$(DEVICE)
	@mkdir -p $(quick)
	@echo "1. a vocabulary, and tokens, from the text in $(TEXT)"
	@./train_gpt tokenize $(TEXT) --output $(quick)/text --train-tokenizer 2048 --val-fraction 0.02 --overwrite
	@echo "2. training on them"
	@./train_gpt train --model tiny --tokenizer $(quick)/text_tokenizer.json --train-data '$(quick)/text_train_*.bin' --val-data '$(quick)/text_val_*.bin' \
	    --run-dir $(quick)/run --overwrite $(QUICK_OPTIONS)
	@echo "3. what it has learnt"
	@./train_gpt sample $(quick)/run --tokens 150 --samples 2 --temperature 0.8 --top-p 0.95 --prompt '$(PROMPT)'
	@echo "next: ./train_gpt sample $(quick)/run --prompt '#include' (more text), ./train_gpt train --help (your own run),"
	@echo "      make test (prove the build), make bench (measure the speed)"

.PHONY: bench
bench: bench-kernels bench-train

# KERNELS: groups of kernels, and --quick or --full
.PHONY: bench-kernels
bench-kernels:
	@$(MAKE) --no-print-directory $(BUILD)/bench_kernels
	$(BUILD)/bench_kernels $(KERNELS)

# MODELS: MODEL:BxT or MODEL:BxTxM each
.PHONY: bench-train
bench-train:
	@$(MAKE) --no-print-directory $(BUILD)/bench_train
	test/bench_train.sh $(BUILD) $(MODELS)

.PHONY: bench-parallel
bench-parallel:
	@$(MAKE) --no-print-directory $(BUILD)/bench_parallel
	test/bench_parallel.sh $(BUILD)

.PHONY: bench-checkpoint
bench-checkpoint:
	@$(MAKE) --no-print-directory $(BUILD)/bench_checkpoint
	test/bench_checkpoint.sh $(BUILD)

# programs in test/ that are no tests
tools := bench_kernels bench_train bench_parallel bench_tokenizer compare_runs reshard token_likelihoods bench_checkpoint forge_checkpoint
$(tools:%=$(BUILD)/%): $(BUILD)/%: $(BUILD)/%.o $(shim)
	$(link) $^ -o $@ $(libs)

$(tools:%=$(BUILD)/%.o): $(BUILD)/%.o: test/%.cu $(BUILD)/command | $(BUILD)/found-build
	$(compile) -MMD -MP -c $< -o $@

# What the tests put between a program and its file system.
$(BUILD)/%.so: test/%.cc $(BUILD)/command
	$(CXX) -std=c++20 -O1 -g1 $(warnings) -shared -fPIC $< -o $@

# ----------------------------------------------------------------------------------------------------------
# a folder to copy to other machines: the program and the libraries it needs

DIST   ?= dist
packed := $(DIST)/train_gpt-$(DEVICE)-$(CPU_ARCH)
# What a node brings: the C library, the driver of the card, and Open MPI with what only that needs.
node_has := ld-linux|lib(c|m|dl|rt|pthread|resolv|util)\.so|lib(cuda|nvidia-ml)\.so|lib(mpi|open-)

# Follows the names of needed libraries from the program on. $$1 is what is looked through.
.PHONY: dist
dist: $(BUILD)/train_gpt
	@rm -rf $(packed) $(packed).tar.gz; mkdir -p $(packed)/lib; cp $< README.md LICENSE $(packed); \
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
# what is here

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
# the place of a header, or "not found"
where = $(or $(shell printf '$(hash)include <$(1)>\n' | $(CXX) -M -x c++ -std=c++20 $(includes) -I$(cuda_include) - 2>/dev/null | tr ' \\' '\n\n' | grep -m1 '/$(1)$$'),not found: package $(2))

.PHONY: info
info:
	$(call show,what,found here,to override)
	$(call show,device,$(DEVICE)$(if $(why), ($(why))),DEVICE=cuda|cpu|simt)
	$(call show,precision,$(PRECISION),PRECISION=bf16|fp32)
	$(call show,compiler,$(or $(shell $(CXX) --version 2>/dev/null | head -1),$(CXX) not found: package g++),CXX=clang++)
	$(call show,CPU,$(shell sed -n 's/model name.*: //p;T;q' /proc/cpuinfo)$(comma) $(cores) cores$(comma) code for $(CPU_ARCH),CPU_ARCH=x86-64-v3)
	$(call show,nvcc,$(or $(NVCC),not found)$(if $(NVCC), $(shell $(NVCC) --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')$(comma) code for sm_$(subst $(empty) $(empty), sm_,$(GPU_ARCH))),NVCC=path GPU_ARCH="80 90a")
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
	$(call show,doctest,$(call where,doctest/doctest.h,doctest-dev),(tests only))
	$(call show,Boost,$(call where,boost/context/detail/fcontext.hpp,libboost-context-dev),(tests only))

.PHONY: format
format:
	git ls-files '*.cu' '*.cuh' '*.h' '*.cc' | xargs clang-format -i

.PHONY: clean
clean:
	rm -rf build dist train_gpt
