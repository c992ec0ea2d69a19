# train_gpt: pre-training of GPT-style models. The targets:
#
#   make               build ./train_gpt for the device found here (make DEVICE=cuda|cpu|simt to choose)
#   make quickstart    train a small model on text found on this machine (TEXT=path for your own)
#   make test          build and run the tests; make test-all adds fuzzing, sanitizers and longer runs
#   make bench         measure speed
#   make info          what was found here, and how to override it
#   make deps          install the packages that are missing
#   make format, make clean

# ---------------------------------------------------------------------------------------------------------------------
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

CXX      := $(if $(filter default,$(origin CXX)),g++,$(CXX))
CPU_ARCH ?= $(if $(filter cuda,$(DEVICE)),x86-64-v3,native)
GPU_ARCH ?= 80 90a
MPI      ?= on
MPICXX   ?= mpicxx
PYTHON   ?= python3
BUILD    := build/$(DEVICE)-$(PRECISION)

# ---------------------------------------------------------------------------------------------------------------------
# how each device is compiled and linked

ifeq ($(MPI),on)
mpi_compile := $(shell $(MPICXX) --showme:compile 2>/dev/null)
mpi_link    := $(shell $(MPICXX) --showme:link 2>/dev/null)
else
mpi_compile := -DWITHOUT_MPI
mpi_link    :=
endif

precision_fp32 :=
precision_bf16 := -DPRECISION_BF16
includes := -I. $(patsubst -I%,-isystem %,$(mpi_compile)) $(CPPFLAGS)
defines  := $(precision_$(PRECISION))
# GCC 12 sees an overlap that is not there in operator+ of std::string (its bug 105651): -Wno-restrict
warnings := -Wall -Wextra -Wno-restrict -Werror
host     := -std=c++20 -g -fno-math-errno -fno-trapping-math -march=$(CPU_ARCH) -fopenmp $(warnings) $(CXXFLAGS)

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
empty :=
comma := ,
list   = $(subst $(empty) $(empty),$(comma),$(strip $(1)))
compile := $(NVCC) -x cu -std=c++20 -O3 -lineinfo --expt-relaxed-constexpr --extended-lambda --threads 0 \
           $(foreach arch,$(GPU_ARCH),-gencode arch=compute_$(arch)$(comma)code=sm_$(arch)) -Werror all-warnings \
           -Xcompiler $(call list,-march=$(CPU_ARCH) -fopenmp -Wall -Wextra) $(defines) $(includes)
link    := $(NVCC) -Xcompiler -fopenmp
libs    := -lcublasLt -lnccl
endif
libs += -lxxhash $(LDFLAGS)
nvcc_link = $(if $(filter cuda,$(DEVICE)),$(foreach flag,$(mpi_link),-Xlinker $(flag)),$(mpi_link))

# ---------------------------------------------------------------------------------------------------------------------
# what must be installed: header or program, and the Debian package that has it

need_build := cxxopts.hpp=libcxxopts-dev nlohmann/json.hpp=nlohmann-json3-dev xxhash.h=libxxhash-dev
need_build += $(if $(filter cuda,$(DEVICE)),cublasLt.h=libcublas-dev nccl.h=libnccl-dev,dnnl.h=libdnnl-dev)
need_build += $(if $(filter on,$(MPI)),mpi.h=libopenmpi-dev)
need_test  := doctest/doctest.h=doctest-dev boost/context/detail/fcontext.hpp=libboost-context-dev dnnl.h=libdnnl-dev
need_tools := $(CXX)=g++ $(if $(filter on,$(MPI)),mpirun=openmpi-bin)
fuzzers    := clang++=clang libclang_rt.fuzzer=libclang-rt-dev

has_header  = printf '\#if !__has_include(<%s>)\n\#error\n\#endif\n' $(1) | $(CXX) -E -x c++ $(includes) \
              $(if $(filter cuda,$(DEVICE)),-I$(dir $(NVCC))../include) - >/dev/null 2>&1
has_program = command -v $(1) >/dev/null 2>&1

part  = $(word $(1),$(subst =, ,$(2)))
# Shell commands that print the package of each thing that is missing.
find_missing = $(foreach need,$(need_tools),$(call has_program,$(call part,1,$(need))) || echo $(call part,2,$(need));) \
               $(foreach need,$(1),$(call has_header,$(call part,1,$(need))) || echo $(call part,2,$(need));)

define require
@missing=$$($(call find_missing,$(1))); [ -z "$$missing" ] || { \
    echo "train_gpt: missing here: $$(echo $$missing); run 'make deps', or: apt-get install $$(echo $$missing)" >&2; exit 1; }
endef

# ---------------------------------------------------------------------------------------------------------------------
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
	$(link) $^ -o $@ $(libs) $(nvcc_link)

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

# ---------------------------------------------------------------------------------------------------------------------
# tests

test_sources := $(basename $(notdir $(wildcard test/test_*.cu)))
host_only    := test_data test_options test_weights_file
units        := $(filter-out test_main $(if $(filter simt,$(DEVICE)),$(host_only),test_simt),$(test_sources))

.PHONY: units
units: $(units:%=$(BUILD)/%)

$(BUILD)/test_%: $(BUILD)/test_%.o $(BUILD)/test_main.o $(shim)
	$(link) $^ -o $@ $(libs) $(nvcc_link)

$(BUILD)/test_%.o: test/test_%.cu $(BUILD)/command | $(BUILD)/found-build $(BUILD)/found-test
	$(compile) -MMD -MP -c $< -o $@

# The shim calls no hooks itself.
$(BUILD)/simt.o: test/simt/simt.cc $(BUILD)/command
	$(filter-out -fsanitize=thread,$(compile)) -MMD -MP -c $< -o $@

# ---------------------------------------------------------------------------------------------------------------------
# everything else

.PHONY: clean
clean:
	rm -rf build train_gpt

.PHONY: format
format:
	git ls-files '*.cu' '*.cuh' '*.h' '*.cc' | xargs clang-format -i
