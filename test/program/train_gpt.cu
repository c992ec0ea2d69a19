// The program as one of a group of units (group.sh).
#include "test/support/program.h"

int main(int argc, char** argv) {
    return run_train_gpt(argc, argv);
}
