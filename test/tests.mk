# How test programs, and the tools beside them, are built; included by the Makefile. test/run.sh reads from the tests
# themselves which builds they run on, and what they need.

.PHONY: test test-all soak
test: deps
	@test/run.sh test
test-all: deps
	@test/run.sh all
soak: deps
	@test/run.sh soak

# test_norm is built from test_norm.cu in any folder of test/; `units` builds all units that run on this build
vpath test_%.cu $(wildcard test/*/)
.PHONY: units
units: $(if $(filter units,$(MAKECMDGOALS)),$(addprefix $(BUILD)/,$(shell test/run.sh units $(build))))

# Suites without kernels, and those that run whole steps of tiny models, are compiled at a quicker level: -Og on a CPU, else
# -O1, because nvcc has no -Og, and at -Og kernels on the simulated device read data that they do not use.
quickly = $(if $(SANITIZE),,$(if $(findstring /data,$(1))$(findstring /program,$(1))$(findstring /comm,$(1)),$(if \
              $(filter cpu,$(DEVICE)),-Og,-O1)))
# Groups for a CPU have no line numbers, because no report there needs them; a unit that is built by itself has them.
lines   = $(if $(SANITIZE),,$(if $(filter cpu,$(DEVICE)),-g0))
# Checks have no exception handlers: a check that throws fails and ends its case, and handlers for 4000 checks would have to
# be compiled. On the simulated device they stay: without them GCC loads, before a branch, data that the kernel does not use.
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
# A group that contains the program needs the program's other objects. Each program in a group also gets a hard link with its
# name.
$(BUILD)/tests/program-1: $(if $(shell grep -s program/train_gpt.cu $(BUILD)/tests/program-1.cu),$(commands))
.PHONY: $(BUILD)/tests/program-1.also
$(BUILD)/tests/program-1.also: $(BUILD)/tests/program-1
	@for name in $$(sed -n 's/^const bool is_\([a-z_]*\) .*/\1/p' $<.cu); do [ -e $(BUILD)/$$name.o ] || ln -f $< $(BUILD)/$$name; done

# Objects that depend on neither device nor precision are built once for all builds.
$(shared)/command: FORCE
	@mkdir -p $(shared)
	@echo '$(plain)' | cmp -s - $@ || echo '$(plain)' > $@
# The shim is not instrumented: it is what the instrumentation calls.
$(shared)/simt.o: test/simt/simt.cc $(shared)/command | $(BUILD)/found-simt
	$(plain) -O2 -Wno-unknown-pragmas -Itest/simt -MMD -MP -c $< -o $@
$(shared)/%.o: test/support/%.cc $(shared)/command | $(BUILD)/found-test
	$(plain) -MMD -MP -c $< -o $@

# Files that programs share are built first, because programs are built in parallel.
.PHONY: $(BUILD)/ready
$(BUILD)/ready: $(BUILD)/command $(BUILD)/found-build $(BUILD)/found-test $(shared)/main.o $(objects)

# programs that are not tests: benchmarks, and the scripts' tools, which are compiled at -O1, which is quicker
tools := $(basename $(notdir $(wildcard test/tools/*.cu test/bench/*.cu)))
$(tools:%=$(BUILD)/%.o): $(BUILD)/%.o: %.cu $(BUILD)/command test/tests.mk | $(BUILD)/found-build
	$(call compile_at,$(if $(findstring test/tools,$<),-O1)) -MMD -MP -c $< -o $@
vpath %.cu test/tools test/bench
$(tools:%=$(BUILD)/%): $(BUILD)/%: $(BUILD)/%.o $(objects)
	$(link) $^ -o $@ $(libs)

# Libraries that tests preload between a program and its file system.
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

# MODELS: each MODEL:BxT or MODEL:BxTxM, optionally followed by :bf16, :fp8 or :fp8-fast
.PHONY: bench-train
bench-train:
	@$(MAKE) --no-print-directory $(BUILD)/bench_train
	test/bench/bench_train.sh $(BUILD) $(MODELS)

.PHONY: bench-parallel
bench-parallel:
	@$(MAKE) --no-print-directory $(BUILD)/bench_parallel
	test/bench/bench_parallel.sh $(BUILD)

# RESULTS: the folder for the runs, which lets an interrupted comparison continue
.PHONY: bench-optimizers
bench-optimizers:
	@$(MAKE) --no-print-directory $(BUILD)/train_gpt
	test/bench/compare_optimizers.py $(BUILD)/train_gpt $(or $(RESULTS),runs/optimizers)

# How well the planner predicts published step times, and its constants, fitted on them
.PHONY: calibrate-planner
calibrate-planner:
	@$(MAKE) --no-print-directory $(BUILD)/calibrate_planner
	$(BUILD)/calibrate_planner

# Planned steps beside those that the executor runs
.PHONY: bench-plan
bench-plan:
	@$(MAKE) --no-print-directory $(BUILD)/bench_plan
	test/bench/bench_plan.sh $(BUILD)

# The work of kernels for each unit of a card, without a card (NOCARD=a100: an A100 instead of an H100)
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
