# shellcheck shell=bash
# Training text that is always the same, so that losses which a script compares differ only if the program does.
# Sourced after checks.sh; sets $text, a folder of 40 files of some 11 kB.

# write_text FOLDER SEED    sentences over 600 made-up words: the more common a word, the shorter; each is mostly
# followed by one of a few others, which is what a model can learn
write_text() {
    mkdir -p "$1"
    awk -v folder="$1" -v state="$2" '
        # 31 bits, exact in double precision (Park and Miller: Random number generators, 1988)
        function draw(n) { state = state * 16807 % 2147483647; return int(state / 2147483647 * n) }
        # 0 to n - 1, the small ones often
        function common(n,    x) { x = draw(1000000) / 1000000; return int(n * x * x * x) }
        function made_up(syllables,    word) {
            while (syllables-- > 0) word = word substr("bdfgklmnprstvz", 1 + draw(14), 1) substr("aeiou", 1 + draw(5), 1)
            return word
        }
        BEGIN {
            for (i = 0; i < 600; i++) words[i] = made_up(1 + (i > 30) + (i > 200)) (draw(3) ? "" : "n")
            for (i = 0; i < 600; i++) for (j = 0; j < 4; j++) next_of[i, j] = common(600)
            for (i = 0; i < 10; i++) draw(2) # what begins alike is soon apart
            for (file = 0; file < 40; file++) {
                path = folder "/" sprintf("%02d", file) ".txt"
                for (paragraph = 0; paragraph < 30; paragraph++) {
                    for (sentence = 3 + draw(6); sentence > 0; sentence--) {
                        word = common(600)
                        line = toupper(substr(words[word], 1, 1)) substr(words[word], 2)
                        for (left = 4 + draw(16); left > 0; left--) {
                            word = draw(4) ? next_of[word, draw(4)] : common(600)
                            line = line (draw(12) ? " " : ", ") words[word]
                        }
                        printf "%s%s", line, (draw(9) ? ". " : "?\n") > path
                    }
                    print "\n" > path
                }
                close(path)
            }
        }'
}
text=$work/seeded
write_text "$text" 1988
