#!/usr/bin/env python3
"""
Writes the golden tokenizers in tokenizers/ beside this script, and the ids that Hugging Face's `tokenizers` gives
texts with them, for our reader to reproduce.

    pip install tokenizers==0.23.3 tiktoken==0.14.0
    python3 test/golden/make_tokenizers.py

Nothing is downloaded: small vocabularies are trained on the texts below, in the shapes that published models have.

    gpt2      ByteLevel
    llama3    Split with Llama 3's pattern and ByteLevel; ignore_merges, with words that no merge makes
    qwen      NFC, Split with Qwen's pattern and ByteLevel; added tokens of every kind
    claude    NFKC, ByteLevel
    deepseek  a Sequence of three Splits and Digits before ByteLevel
    gpt4o     Split with GPT-4o's pattern (cases of letters, marks) that is Removed, inverted
    llama2    characters, byte_fallback; Prepend and Replace
    metaspace the same with Metaspace, and merges within words only

Characters in the texts that normal forms change exist in Unicode 9, because the library normalizes by that version.

ids.json holds the texts, and for each tokenizer the ids of each text with special tokens recognized; as_text has the ids
with special tokens treated as text, if they differ. decoded has the library's decoding of the ids, if that is not the
text. normalized has each text in the normal forms that change it. Running the script again gives the same bytes.
"""

import json
import random
import unicodedata
from pathlib import Path

import tiktoken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import trainers

HERE = Path(__file__).parent / "tokenizers"

ENGLISH = """The quick brown fox doesn't jump; it's the lazy dog's turn, they'll say. I'VE SEEN IT, and we'd agree.
In 1969 about 600,000,000 people watched; 3.14159 is not 22/7.  Two spaces, then a tab:\tand a line break.\r\n
The training of a language model begins with text. The text is cut into words, and the words are cut into tokens.
Naïve café façade, coöperate; Łódź, São Paulo, Zürich, Ångström, straße, ﬁnd the ſame K signs.
"""
CHINESE = """今天天气很好，我们去公园散步吧。语言模型的训练从文本开始：先把文本切成词，再把词切成标记。
二〇二四年十二月三十一日，第１２３号。他说：“你好，世界！”然后离开了。𠀀𪚥是罕见的汉字。こんにちは世界。カタカナ、ひらがな。
한국어도 있습니다. 안녕하세요, 세계!
"""
ARABIC = """تبدأ عملية تدريب النموذج اللغوي بالنص. يُقَطَّعُ النَّصُّ إلى كلمات، ثم إلى رموز. العدد ١٢٣٤٥ والسنة ۲۰۲۴.
مرحبا بالعالم! هل تحب القراءة؟ نعم، كثيرًا.
עברית: שָׁלוֹם עוֹלָם. हिन्दी: नमस्ते दुनिया, क्षत्रिय। ไทย: สวัสดีชาวโลก. தமிழ்: வணக்கம். Русский: Привет, мир! Ελληνικά: Γειά σου Κόσμε.
"""
CODE = """#include <stdio.h>

int main(int argc, char** argv) {
    for (size_t i = 0; i < 10; i++) {
        printf("%zu: %s\\n", i, argv[i] ? argv[i] : "(null)");  // a comment
    }
\tif (x != 0x1F && y >= 1e-9f) return a->b[c]++;


    return 0;
}

def encode(self, text: str, *, add_special_tokens=True) -> list[int]:
    \"\"\"Docstring.\"\"\"
    return [self.vocab.get(t, self.unk_id) for t in self._tokenize(text.lower())] + []
{"key": [1, 2.5, null, true], "url": "https://example.com/a?b=c&d=%20e#f"}
"""
EMOJI = """😀😁😂🤣😃 👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 ❤️ ☃️ ✨🎉 1️⃣2️⃣ ©®™ → ⇒ ∑∫√ ½ ² ³ Ⅷ ① e\u0301\u0323 a\u0308o\u0308u\u0308 \u1100\u1161\u11a8
"""


def random_text(seed, length, pick):
    random.seed(seed)
    return "".join(pick() for _ in range(length))


def any_code_point():
    while True:
        code = random.choice([random.randrange(0x80), random.randrange(0x300), random.randrange(0x3000),
                              random.randrange(0x20000), random.randrange(0x110000)])
        if not 0xD800 <= code < 0xE000:
            return chr(code)


SPACES = ["", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "\u200b", "a", "1", "é", "!", "'s", "中", "\u0301"]
SPECIAL = ["<|endoftext|>", "<|end", "of|>", "<s>", "</s>", "<tool>", "[MASK]", "hello", " ", "  ", "x", "é", "\n",
           "<|im_start|>", "<|im_start|>user", "ﬁ", "Å", "A\u030a", "ọ", "o\u0323", "▁", "<0x41>"]

# characters that NFKC replaces; Unicode 3.2 knew them all
COMPATIBILITY = [chr(code) for code in range(0xa0, 0x20000) if unicodedata.ucd_3_2_0.decomposition(chr(code))]

TEXTS = {
    "empty": "",
    "english": ENGLISH,
    "chinese": CHINESE,
    "arabic": ARABIC,
    "code": CODE,
    "emoji": EMOJI,
    "spaces": random_text(1, 400, lambda: random.choice(SPACES)),
    "special": random_text(2, 300, lambda: random.choice(SPECIAL)),
    "white space around": "hellotwo words </s> \t\u3000x[MASK] [MASK]  \n hello </s></s>\n hello  [MASK]",
    "random bytes": random_text(3, 500, lambda: chr(random.randrange(256))),
    "random code points": random_text(4, 700, any_code_point).replace("\U00010783", ""),  # which is of Unicode 14
    "marks": random_text(5, 300, lambda: random.choice("aeo\u0301\u0323\u0334\u0345\u05b0\u093c\u0cd5\u0cc6\u1161\u11a8가\u1100"
                                                       "\u1df5\u1ab0\U0001d165\U000110ba\U000110a5Å\u212b\u0958\ufb1d")),
    "compatibility": "".join(COMPATIBILITY[::9]) + "ﬃ①½㎒ｶﾞ" + "".join(a + b for a, b in zip(COMPATIBILITY[::99], SPACES * 9)),
    "long words": "a" * 150 + " " + "ab" * 100 + "." * 90 + "中" * 60 + " " * 130 + "x" + "0" * 77 + "=" * 64,
    "new characters": "\u1c89\ua7cb\U0001e5d0\U0002ebf0\u088f\u0c5c\U00011de0a\U00016ff4b\U0001e6c0\u0cdc\u0558",
    "new line at the end": "word\n",
    "leading space": "  two words",
}

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
          r"\s+(?!\S)|\s+")
QWEN = LLAMA3.replace("{1,3}", "")
GPT4O = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
CL100K = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|"
          r"\s+(?!\S)|\s+")
DEEPSEEK = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
            r"\s*[\r\n]+|\s+(?!\S)|\s+")


def train(tokenizer, size, alphabet, special=()):
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=sorted(alphabet), show_progress=False,
                                  special_tokens=list(special))
    tokenizer.train_from_iterator([ENGLISH, CHINESE, ARABIC, CODE, EMOJI], trainer)


def byte_level(size, pre_tokenizer, special=(), normalizer=None, **model):
    tokenizer = Tokenizer(models.BPE(**model))
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    train(tokenizer, size, pre_tokenizers.ByteLevel.alphabet(), special)
    return tokenizer


def splits(*steps):
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def gpt2():
    tokenizer = byte_level(700, pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def llama3():
    tokenizer = byte_level(700, splits(pre_tokenizers.Split(Regex(LLAMA3), "isolated")))
    settings = json.loads(tokenizer.to_str())
    settings["model"]["ignore_merges"] = True
    for word in ["Ġlanguage", "Ġtraining", "odel", "今天天", "ĠinĠthe"]:
        settings["model"]["vocab"].setdefault(word, len(settings["model"]["vocab"]))
    tokenizer = Tokenizer.from_str(json.dumps(settings))
    tokenizer.add_special_tokens(["<s>", "<|end", "<|endoftext|>"])
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", begin)])])
    return tokenizer


def qwen():
    tokenizer = byte_level(700, splits(pre_tokenizers.Split(Regex(QWEN), "isolated")), normalizer=normalizers.NFC(),
                           special=["<|endoftext|>"])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(["<|im_start|>", AddedToken("[MASK]", lstrip=True, special=True),
                                  AddedToken("</s>", rstrip=True, special=True)])
    tokenizer.add_tokens(["<tool>", AddedToken("hello", normalized=True, lstrip=True), AddedToken("o\u0323", normalized=True),
                          AddedToken("ﬁ", normalized=False), AddedToken("<|im_start|>user", normalized=False)])
    return tokenizer


def claude():
    return byte_level(700, pre_tokenizers.ByteLevel(add_prefix_space=False), normalizer=normalizers.NFKC())


def deepseek():
    return byte_level(600, splits(pre_tokenizers.Digits(individual_digits=False),
                                  pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
                                  pre_tokenizers.Split(Regex("[一-龥぀-ゟ゠-ヿ]+"), "isolated"),
                                  pre_tokenizers.Split(Regex(DEEPSEEK), "isolated")))


def gpt4o():
    return byte_level(600, splits(pre_tokenizers.Split(Regex(GPT4O), "removed", invert=True)))


def characters(pre_tokenizer=None, normalizer=None):
    """A BPE over characters, with the tokens of all bytes in front."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    train(trained, 500, [])
    settings = json.loads(trained.to_str())
    model = settings["model"]
    first = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    rare = set(CHINESE[::2])  # characters that have only bytes, wherever no merge needs them
    needed = set("".join(left + right for left, right in model["merges"]))
    words = [word for word in model["vocab"] if not (len(word) == 1 and word in rare and word not in needed)]
    model["vocab"] = {word: id for id, word in enumerate(first + words)}
    model.update(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    settings["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(settings))
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(content=" ", left=1, right=0)])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in ("<unk>", "<s>", "</s>")])
    return tokenizer


def llama2():
    return characters(normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]))


def metaspace():
    tokenizer = characters(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=True))
    tokenizer.add_tokens([AddedToken("hello", normalized=True)])
    return tokenizer


def tiktoken_ids(vocabulary):
    printable = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
    ranks = {bytes(alphabet[letter] for letter in token): rank for token, rank in vocabulary.items()
             if all(letter in alphabet for letter in token)}
    encoding = tiktoken.Encoding("ranks", pat_str=CL100K, mergeable_ranks=ranks, special_tokens={})
    return {name: encoding.encode_ordinary(text) for name, text in TEXTS.items()}


def main():
    HERE.mkdir(exist_ok=True)
    golden = {"texts": TEXTS, "tokenizers": {}}
    for make in (gpt2, llama3, qwen, claude, deepseek, gpt4o, llama2, metaspace):
        path = HERE / f"{make.__name__}.json"
        path.write_text(make().to_str(), encoding="utf-8")
        tokenizer = Tokenizer.from_file(str(path))
        results = golden["tokenizers"][make.__name__] = {}
        for name, text in TEXTS.items():
            tokenizer.encode_special_tokens = False
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            result = results[name] = {"ids": ids}
            decoded = tokenizer.decode(ids, skip_special_tokens=False)
            if decoded != text:
                result["decoded"] = decoded
            tokenizer.encode_special_tokens = True
            as_text = tokenizer.encode(text, add_special_tokens=False).ids
            if as_text != ids:
                result["as_text"] = as_text
    golden["normalized"] = {}
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        changed = {name: getattr(normalizers, form)().normalize_str(text) for name, text in TEXTS.items()}
        golden["normalized"][form] = {name: text for name, text in changed.items() if text != TEXTS[name]}
    golden["tiktoken"] = tiktoken_ids(json.loads((HERE / "llama3.json").read_text())["model"]["vocab"])
    (HERE / "ids.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
