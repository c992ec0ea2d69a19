// libFuzzer: whatever a config.json holds, it is refused in one line, or gives a consistent model that is the
// same after its config is written and read again. The first byte chooses what the rest is: the text, or
// damage to one of the published configs.
#include <cstdlib>

#include "data/exchange/hf_config.h"
#include "test/fuzz/fuzz_json.h"
#include "test/data/hf_configs.h"

static int test_one_input(const uint8_t* data, size_t size) {
    if (size == 0) return 0;
    std::string text((const char*)data + 1, size - 1);
    static const nlohmann::json published[] = {hf_gpt2(),     hf_llama(), hf_mistral(),
                                               hf_qwen2(),    hf_qwen3(), hf_seed_oss(),
                                               hf_gpt_neox(), hf_gptj(),  hf_yuan2()};
    constexpr size_t kinds = std::size(published) + 1;
    if (data[0] % kinds < std::size(published)) {
        nlohmann::json config = published[data[0] % kinds];
        damage_json(config, text);
        text = config.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    }
    ModelConfig config;
    try {
        config = parse_hf_config(text, "config.json");
        complete(config);
        if (parameter_count(config) <= 0 || config.heads % config.kv_heads) abort();
    } catch (const Error& error) {
        for (const char* c = error.what(); *c; c++) {
            if ((unsigned char)*c < 0x20) abort();
        }
        return 0;
    }
    std::string written = hf_config_json(config, "float32", -1).dump();
    ModelConfig again = parse_hf_config(written, "config.json");
    complete(again);
    if (hf_config_json(again, "float32", -1).dump() != written) abort();
    return 0;
}
