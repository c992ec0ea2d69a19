# How test programs, and the tools beside them, are built; included by the Makefile. What runs on which build, and what
# it needs, is read from the tests themselves by test/run.sh.

.PHONY: test test-all soak
test: deps
	@test/run.sh test
test-all: deps
	@test/run.sh all
soak: deps
	@test/run.sh soak

# test_norm, made from the file of that name in any folder here, and the names of all that run on this build
vpath test_%.cu $(wildcard test/*/)
.PHONY: units
units: $(if $(filter units,$(MAKECMDGOALS)),$(addprefix $(BUILD)/,$(shell test/run.sh units $(build))))

# Suites without kernels, and those of whole steps of tiny models, are compiled more quickly. nvcc has no -Og, and with it
# kernels on the simulated device read what they do not use.
quickly = $(if $(SANITIZE),,$(if $(findstring /data,$(1))$(findstring /program,$(1))$(findstring /comm,$(1)),$(if \
              $(filter cpu,$(DEVICE)),-Og,-O1)))
# Nobody looks for lines in a group on a CPU, where no report names any: a unit that is built by itself has them.
lines   = $(if $(SANITIZE),,$(if $(filter cpu,$(DEVICE)),-g0))
# A check that throws ends its case, which has failed: handlers that go on behind each of 4000 checks would have to be
# compiled. On the simulated device, other code around a kernel lets GCC read ahead of a branch what the kernel does not use.
asserts := $(if $(filter simt,$(DEVICE)),,-DDOCTEST_CONFIG_SUPER_FAST_ASSERTS)

$(BUILD)/test_%.o: test_%.cu $(BUILD)/command test/tests.mk | $(BUILD)/found-build $(BUILD)/found-test
	$(call compile_at,$(call quickly,$<)) $(asserts) -MMD -MP -c $< -o $@

# groups of units, written by test/run.sh
$(BUILD)/tests/%.o: $(BUILD)/tests/%.cu $(BUILD)/command test/tests.mk | $(BUILD)/found-build $(BUILD)/found-test
	$(call compile_at,$(call quickly,$<)) $(lines) $(asserts) -MMD -MP -c $< -o $@

$(BUILD)/test_%: $(BUILD)/test_%.o $(shared)/main.o $(objects)
	$(link) $^ -o $@ $(libs)
$(BUILD)/tests/%: $(BUILD)/tests/%.o $(shared)/main.o $(objects)
	$(link) $^ -o $@ $(libs)
# One that is the program too needs the rest of it; and what else one is has a name of its own.
$(BUILD)/tests/program-1: $(if $(shell grep -s program/train_gpt.cu $(BUILD)/tests/program-1.cu),$(commands))
.PHONY: $(BUILD)/tests/program-1.also
$(BUILD)/tests/program-1.also: $(BUILD)/tests/program-1
	@for name in $$(sed -n 's/^const bool is_\([a-z_]*\) .*/\1/p' $<.cu); do [ -e $(BUILD)/$$name.o ] || ln -f $< $(BUILD)/$$name; done

# Objects that know neither device nor precision are built once for all.
$(shared)/command: FORCE
	@mkdir -p $(shared)
	@echo '$(plain)' | cmp -s - $@ || echo '$(plain)' > $@
# The shim is not instrumented: it is what the instrumentation calls.
$(shared)/simt.o: test/simt/simt.cc $(shared)/command | $(BUILD)/found-simt
	$(plain) -O2 -Wno-unknown-pragmas -Itest/simt -MMD -MP -c $< -o $@
$(shared)/%.o: test/support/%.cc $(shared)/command | $(BUILD)/found-test
	$(plain) -MMD -MP -c $< -o $@

# These are shared by programs that are built side by side.
.PHONY: $(BUILD)/ready
$(BUILD)/ready: $(BUILD)/command $(BUILD)/found-build $(BUILD)/found-test $(shared)/main.o $(objects)

# programs that are no tests: benchmarks, and what scripts use, which is compiled more quickly
tools := $(basename $(notdir $(wildcard test/tools/*.cu test/bench/*.cu)))
$(tools:%=$(BUILD)/%.o): $(BUILD)/%.o: %.cu $(BUILD)/command test/tests.mk | $(BUILD)/found-build
	$(call compile_at,$(if $(findstring test/tools,$<),-O1)) -MMD -MP -c $< -o $@
vpath %.cu test/tools test/bench
$(tools:%=$(BUILD)/%): $(BUILD)/%: $(BUILD)/%.o $(objects)
	$(link) $^ -o $@ $(libs)

# Libraries that tests put between a program and its file system.
$(BUILD)/%.so: test/tools/%.cc $(BUILD)/command
	$(CXX) -std=c++20 -O1 -g1 $(warnings) -shared -fPIC $< -o $@

include test/nocard/nocard.mk

# ----------------------------------------------------------------------------------------------------------
# benchmarks

.PHONY: bench
bench: bench-kernels bench-train

# KERNELS: groups of kernels, and --quick or --full
.PHONY: bench-kernels
bench-kernels:
	@$(MAKE) --no-print-directory $(BUILD)/bench_kernels
	$(BUILD)/bench_kernels $(KERNELS)

# MODELS: MODEL:BxT or MODEL:BxTxM each, and :bf16, :fp8 or :fp8-fast behind it
.PHONY: bench-train
bench-train:
	@$(MAKE) --no-print-directory $(BUILD)/bench_train
	test/bench/bench_train.sh $(BUILD) $(MODELS)

.PHONY: bench-parallel
bench-parallel:
	@$(MAKE) --no-print-directory $(BUILD)/bench_parallel
	test/bench/bench_parallel.sh $(BUILD)

# RESULTS: where runs are kept, so that what was interrupted goes on
.PHONY: bench-optimizers
bench-optimizers:
	@$(MAKE) --no-print-directory $(BUILD)/train_gpt
	test/bench/compare_optimizers.py $(BUILD)/train_gpt $(or $(RESULTS),runs/optimizers)

# How well the planner predicts published step times, and its constants, fitted on them
.PHONY: calibrate-planner
calibrate-planner:
	@$(MAKE) --no-print-directory $(BUILD)/calibrate_planner
	$(BUILD)/calibrate_planner

# Planned steps beside those that the executor takes
.PHONY: bench-plan
bench-plan:
	@$(MAKE) --no-print-directory $(BUILD)/bench_plan
	test/bench/bench_plan.sh $(BUILD)

# The work of kernels for a card's units, without a card (NOCARD=a100: another than an H100)
.PHONY: bench-counts
bench-counts:
	@$(MAKE) --no-print-directory DEVICE=cuda build/nocard/train_gpt
	test/bench/bench_counts.sh build/nocard/train_gpt $(COUNTED)

# measures what recording the times of steps costs
.PHONY: bench-timings
bench-timings:
	@$(MAKE) --no-print-directory $(BUILD)/train_gpt
	test/bench/bench_timings.sh $(BUILD) 20

.PHONY: bench-tables
bench-tables:
	@$(MAKE) --no-print-directory $(BUILD)/train_gpt $(BUILD)/bench_tables
	test/bench/bench_tables.sh $(BUILD)

.PHONY: bench-checkpoint
bench-checkpoint:
	@$(MAKE) --no-print-directory $(BUILD)/bench_checkpoint
	test/bench/bench_checkpoint.sh $(BUILD)
