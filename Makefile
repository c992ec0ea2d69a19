DEVICE    ?= cpu
PRECISION ?= $(if $(filter cuda,$(DEVICE)),bf16,fp32)
BUILD     := build/$(DEVICE)-$(PRECISION)
WARNINGS  := -Wall -Wextra
CXX       ?= g++
NVCC      ?= nvcc
GPU_ARCH  ?= 80 90a
CPU_ARCH  ?= native

cpp_fp32 :=
cpp_bf16 := -DPRECISION_BF16
CPPFLAGS += -I. $(cpp_$(PRECISION))
cxxflags := -std=c++20 -g -fno-math-errno -fno-trapping-math -march=$(CPU_ARCH) $(WARNINGS)

ifeq ($(DEVICE),cpu)
compile = $(CXX) -x c++ $(cxxflags) -O3 -fopenmp -DDEVICE_CPU $(CPPFLAGS)
libs    = -fopenmp -ldnnl
endif
ifeq ($(DEVICE),simt)
# -fsanitize=thread only at compile time: the shim supplies the hooks it calls at each memory access.
compile = $(CXX) -x c++ $(cxxflags) -O2 -fopenmp -Itest/simt $(CPPFLAGS) -fsanitize=thread
libs    = -fopenmp -ldnnl -lboost_context
shim    = $(BUILD)/simt.o
endif
ifeq ($(DEVICE),cuda)
gencode := $(foreach arch,$(GPU_ARCH),-gencode arch=compute_$(arch),code=sm_$(arch))
compile = $(NVCC) -x cu -std=c++20 -O3 -lineinfo --expt-relaxed-constexpr --extended-lambda $(gencode) -Xcompiler -Wall,-Wextra,-fopenmp $(CPPFLAGS)
libs    = -lcublasLt -lgomp
endif

$(BUILD)/%.o: %.cu | $(BUILD)
	$(compile) -MMD -MP -c $< -o $@
$(BUILD)/%.o: test/%.cu | $(BUILD)
	$(compile) -MMD -MP -c $< -o $@
# The shim itself is not instrumented.
$(BUILD)/simt.o: test/simt/simt.cc | $(BUILD)
	$(filter-out -fsanitize=thread,$(compile)) -MMD -MP -c $< -o $@
$(BUILD)/test_%: $(BUILD)/test_%.o $(BUILD)/test_main.o $(shim)
	$(if $(filter cuda,$(DEVICE)),$(NVCC),$(CXX)) $^ -o $@ $(libs) $(LDFLAGS)
$(BUILD):
	mkdir -p $@
-include $(wildcard $(BUILD)/*.d)
.SECONDARY:
