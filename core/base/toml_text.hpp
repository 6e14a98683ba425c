#pragma once
// A filter in front of toml++: up to its version 3.4, a character beyond ASCII where it looks for white space is
// undefined behaviour (known to its authors), so it is given none.
#include <string>
#include <string_view>

namespace tandem {

/// `toml` in ASCII: characters beyond it become escapes in "strings" and question marks in comments; lines stay where
/// they are. `toml` may be any bytes. Throws UsageError about `what`, with the line, for such a character elsewhere
/// (TOML allows it in 'literal strings' too, which have no escapes), for bytes that are no UTF-8, and for more than a
/// MiB.
std::string toml_in_ascii(std::string_view toml, std::string_view what);

}  // namespace tandem
