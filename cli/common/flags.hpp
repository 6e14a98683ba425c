#pragma once
// Flags of a subcommand, made of the table of configuration fields.
#include <CLI/CLI.hpp>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "train/config/config.hpp"

namespace tandem {

/// Collects what was typed; `apply` makes a configuration of it, flags over files.
class ConfigFlags {
 public:
  /// Adds flags for the named fields (all where `names` is empty), and --config. Those that are `swept` take several
  /// values, of which `config` knows the first.
  void add_to(CLI::App& command, const std::vector<std::string_view>& names = {},
              const std::vector<std::string_view>& swept = {});
  /// Reads --config, or `base` where that exists and --config is not given, then the flags. Throws UsageError.
  TrainConfig config(const std::string& base = {}) const;
  bool given(std::string_view name) const;
  bool config_file_given() const { return !config_file_.empty(); }
  /// Values of a flag as typed; empty where it was not given.
  std::vector<std::string> values(std::string_view name) const;
  /// --out as typed; empty where it was not.
  std::string out() const;

 private:
  /// --name and --no-name, as typed.
  struct Switch {
    bool on = false;
    bool off = false;
  };

  std::map<std::string, std::vector<std::string>, std::less<>> values_;
  std::map<std::string, Switch, std::less<>> switches_;
  std::string config_file_;
};

}  // namespace tandem
