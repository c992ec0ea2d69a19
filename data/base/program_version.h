/*
Which program it is: for --version, and for the header of a checkpoint.
*/
#pragma once

constexpr const char* program_version = "train_gpt 0.6";
