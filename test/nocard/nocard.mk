# Builds what nvcc compiles so that it runs on a machine without a card; included by test/tests.mk.
#
#   make DEVICE=cuda build/nocard/train_gpt          the program
#   make DEVICE=cuda build/nocard/test_norm          a unit of kernels, as nvcc makes it
#   NOCARD=a100 build/nocard/train_gpt train ...
#
# Stand-ins are linked as objects in place of the libraries: a program looks for no library when it starts, it
# cannot load a real one by mistake, and a missing function is a linker error.

nocard         := build/nocard
nocard_cards   ?= 90a 80# PTX of these is run; their machine code has the register counts of ptxas
nocard_objects := $(patsubst test/nocard/%.cc,$(nocard)/objects/%.o,$(wildcard test/nocard/*.cc))

# The PTX is not compressed, so that it can be read. Host code is tested elsewhere, so it is not optimized.
nocard_host    := -O0 -g1 $(garbage) -march=x86-64-v3 -fno-math-errno -fno-trapping-math -fopenmp $(warnings)
nocard_compile := $(NVCC) -x cu -std=c++20 -lineinfo --expt-relaxed-constexpr --extended-lambda --threads 0 \
                  --no-compress $(foreach arch,$(nocard_cards), \
                      -gencode arch=compute_$(arch)$(comma)code=[compute_$(arch)$(comma)sm_$(arch)]) \
                  $(if $(STRICT),-Werror all-warnings -Xptxas -v) \
                  -Xcompiler $(call list,$(nocard_host)) -DPRECISION_BF16 $(includes)
nocard_libs    := -fopenmp -lxxhash -lpcre2-8 -lutf8proc -lz -ledit $(mpi_link)

# The code that does a card's work is optimized for this processor.
$(nocard)/objects/%.o: test/nocard/%.cc test/nocard/nocard.mk
	@mkdir -p $(@D)
	$(CXX) -std=c++20 $(if $(filter products kernels,$*),-O3 -march=native,-O1) -g1 -fopenmp $(warnings) \
	    -Wno-psabi -I. -isystem $(cuda_include) $(patsubst -I%,-isystem %,$(mpi_compile)) -MMD -MP -c $< -o $@

$(nocard)/%.o: %.cu test/nocard/nocard.mk | $(BUILD)/found-build
	@mkdir -p $(@D)
	$(nocard_compile) -MMD -MP -c $< -o $@
$(nocard)/tests/%.o: $(nocard)/tests/%.cu test/nocard/nocard.mk | $(BUILD)/found-build
	$(nocard_compile) -MMD -MP -c $< -o $@

$(nocard)/train_gpt.o: $(shared)/program.cu test/nocard/nocard.mk | $(BUILD)/found-build
	@mkdir -p $(@D)
	$(nocard_compile) -MMD -MP -c $< -o $@

# A unit that launches no kernels is compiled without them, because they take longest to compile.
$(nocard)/host/test_%.o: test_%.cu test/nocard/nocard.mk | $(BUILD)/found-build $(BUILD)/found-test
	@mkdir -p $(@D)
	@printf '#ifndef __CUDA_ARCH__\n#include "%s"\n#endif\n' $< >$(@:.o=.cu)
	$(nocard_compile) -MMD -MP -c $(@:.o=.cu) -o $@

# The interpreter's own units need no CUDA and no stand-ins.
$(nocard)/test_ptx_%.o: test/nocard/test_ptx_%.cu test/nocard/nocard.mk | $(BUILD)/found-test
	@mkdir -p $(@D)
	$(CXX) -x c++ -std=c++20 -O1 -g1 $(warnings) -Wno-psabi -I. -MMD -MP -c $< -o $@
$(nocard)/test_ptx_%: $(nocard)/test_ptx_%.o $(nocard)/objects/kernels.o $(shared)/main.o
	$(CXX) $^ -o $@ -fopenmp -lz

$(nocard)/train_gpt: $(nocard)/train_gpt.o $(commands) $(nocard_objects)
	$(CXX) $^ -o $@ $(nocard_libs)
$(nocard)/test_%: $(nocard)/test_%.o $(nocard_objects) $(shared)/main.o
	$(CXX) $^ -o $@ $(nocard_libs)
$(nocard)/host/%: $(nocard)/host/%.o $(nocard_objects) $(shared)/main.o
	$(CXX) $^ -o $@ $(nocard_libs)
$(nocard)/tests/%: $(nocard)/tests/%.o $(nocard_objects) $(shared)/main.o
	$(CXX) $^ -o $@ $(nocard_libs)

.PHONY: $(nocard)/ready
$(nocard)/ready: $(BUILD)/ready $(commands) $(nocard_objects)

-include $(wildcard $(nocard)/*.d $(nocard)/*/*.d)
