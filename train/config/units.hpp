#pragma once
// Quantities as people write them. All parsers throw UsageError with the accepted form.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tandem {

/// "8GiB", "512MiB", "300MB", "1024" -> bytes.
std::size_t parse_size(std::string_view text);
std::string print_size(std::size_t bytes);
/// "1GB/s", "250MiB/s" -> bytes a second.
double parse_bandwidth(std::string_view text);
std::string print_bandwidth(double bytes_per_second);
/// "100M", "1Mi", "4097" -> a count.
std::int64_t parse_count(std::string_view text);

/// Whole text as a number; no trailing characters.
std::int64_t parse_integer(std::string_view text);
double parse_number(std::string_view text);
/// Shortest text that reads back as the same number.
std::string print_number(double value);
/// `value`, but NaN without its sign, which has no meaning and would be printed.
double without_nan_sign(double value);

/// "1.24 B", "124.4 M": parameters for people.
std::string format_count(std::int64_t count);
/// "0:12:58".
std::string format_duration(double seconds);

}  // namespace tandem
