// What is made from the command line's own description: completion for shells, and the man page. They cannot differ from
// --help, since all three read the same.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace hierad {

struct OptionHelp {
  std::vector<std::string> names;   // "--state"; "-f" before "--follow"; a positional: its name without dashes
  std::string value;                // "STATE"; empty: a flag
  std::string about;
  std::vector<std::string> words;   // of its value, where there is a closed set
  bool positional = false;
  bool many = false;
};
struct CommandHelp {
  std::string name, about;
  std::vector<OptionHelp> options;  // its own
};
struct ProgramHelp {
  std::string name, about, footer;
  std::vector<OptionHelp> options;  // of every command
  std::vector<CommandHelp> commands;
};

// Names of all but positionals.
std::vector<std::string> FlagNames(const std::vector<OptionHelp>& options);

// `shell`: bash, zsh or fish.
absl::StatusOr<std::string> CompletionScript(const ProgramHelp& help, const std::string& shell);
std::string ManPage(const ProgramHelp& help, const std::string& version);

}  // namespace hierad
