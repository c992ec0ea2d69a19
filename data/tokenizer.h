/*
Text to tokens and back. Each byte is a token (0 .. 255), so any file can be encoded and decoding gives it
back exactly; token 256 marks the end of a text.
*/
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "data/error.h"

class ByteTokenizer {
public:
    static constexpr int end_of_text = 256;
    static constexpr int vocab_size = 257;
    static constexpr std::string_view end_of_text_name = "<|endoftext|>";

    // Text is data: the name of a special token in it is encoded as the bytes it is written with.
    static void encode(std::string_view text, std::vector<int>& tokens /* replaced */) {
        tokens.resize(text.size());
        for (size_t i = 0; i < text.size(); i++) tokens[i] = (unsigned char)text[i];
    }

    static std::vector<int> encode(std::string_view text) {
        std::vector<int> tokens;
        encode(text, tokens);
        return tokens;
    }

    // The bytes of one token; a special token gives its name.
    static std::string decode(int token) {
        if (token == end_of_text) return std::string(end_of_text_name);
        if (token < 0 || token >= vocab_size) {
            fail("token %d: is outside the vocabulary of %d; check the tokenizer", token, vocab_size);
        }
        return std::string(1, (char)token);
    }

    static std::string decode(const std::vector<int>& tokens) {
        std::string text;
        for (int token : tokens) text += decode(token);
        return text;
    }
};
