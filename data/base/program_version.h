/*
The program's name and version, for --version and the header of a checkpoint.
*/
#pragma once

constexpr const char* program_version = "train_gpt 0.6";
