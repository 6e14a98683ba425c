#pragma once
// The program: one function, so that main stays empty.

namespace tandem {

/// Runs a subcommand. Returns the exit code; every error has been printed as one line.
int run_program(int argc, char** argv) noexcept;

}  // namespace tandem
