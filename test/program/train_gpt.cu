// The program as one unit of a group (group.sh).
#include "test/support/program.h"

int main(int argc, char** argv) {
    return run_train_gpt(argc, argv);
}
