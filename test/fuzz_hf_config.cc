// libFuzzer: whatever a config.json holds, it is a model that fits together or one line of refusal. The first
// byte chooses between the rest as text, and a published config damaged by the rest.
#include <cstdlib>

#include "data/hf_config.h"
#include "test/fuzz_json.h"
#include "test/hf_configs.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size == 0) return 0;
    std::string text((const char*)data + 1, size - 1);
    static const nlohmann::json published[] = {hf_gpt2(), hf_llama(), hf_mistral(), hf_qwen3()};
    if (data[0] % 5 < 4) {
        nlohmann::json config = published[data[0] % 5];
        damage_json(config, text);
        text = config.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    }
    try {
        ModelConfig config = parse_hf_config(text, "config.json");
        complete(config);
        if (parameter_count(config) <= 0 || config.heads % config.kv_heads) abort();
    } catch (const Error& error) {
        for (const char* c = error.what(); *c; c++) {
            if ((unsigned char)*c < 0x20) abort();
        }
    }
    return 0;
}
