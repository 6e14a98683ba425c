#include "cli/program/program.hpp"

int main(int argc, char** argv) { return tandem::run_program(argc, argv); }
