/*
The interpreter's side of kernels.h.
*/
#include "test/nocard/ptx_module.h"

namespace nocard {

std::shared_ptr<PtxModule> load_ptx(const std::string& text, const std::string& name) {
    auto module = std::make_shared<PtxModule>(text, name);
    decode_all(*module);
    return module;
}

bool has_kernel(const PtxModule& module, const std::string& mangled_name) {
    return module.has(mangled_name);
}

std::vector<size_t> parameter_sizes(const PtxModule& module, const std::string& kernel) {
    std::vector<size_t> sizes;
    for (const ptx::Parameter& parameter : module.kernel(kernel).parameters) sizes.push_back(parameter.bytes);
    return sizes;
}

std::vector<size_t> parameter_offsets(const PtxModule& module, const std::string& kernel) {
    std::vector<size_t> offsets;
    for (const ptx::Parameter& parameter : module.kernel(kernel).parameters)
        offsets.push_back(parameter.offset);
    return offsets;
}

KernelFacts facts(const PtxModule& module, const std::string& kernel) {
    const ptx::Kernel& decoded = module.kernel(kernel);
    KernelFacts facts;
    facts.static_shared = decoded.static_shared;
    facts.target = module.target();
    facts.arch_specific = module.arch_specific();
    facts.max_threads = decoded.max_threads;
    for (size_t k = 0; k < 3; k++) facts.required_threads[k] = decoded.required_threads[k];
    return facts;
}

GridCounts run_grid(const GridCall& call) {
    ptx::GridRun run(call, call.module->kernel(call.kernel), call.seed);
    run.run();
    return run.counts();
}

}  // namespace nocard
