#include "client/command_help.h"

#include "base/text.h"

namespace hierad {
namespace {

std::string Joined(const std::vector<std::string>& words, const std::string& between) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : between) + word;
  return text;
}

// In single quotes for a shell.
std::string Quoted(const std::string& text) {
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

bool TakesFile(const CommandHelp& command) {
  for (const OptionHelp& option : command.options) {
    if (option.positional && (option.value == "FILE" || option.value == "RUN_FOLDER")) return true;
  }
  return false;
}
bool TakesJob(const CommandHelp& command) {
  for (const OptionHelp& option : command.options) {
    if (option.positional && option.value == "ID") return true;
  }
  return false;
}
std::vector<std::string> PositionalWords(const CommandHelp& command) {
  for (const OptionHelp& option : command.options) {
    if (option.positional && !option.words.empty()) return option.words;
  }
  return {};
}

// Numbers of the newest jobs, from hierad if it is there.
constexpr char kJobNumbers[] = "hierctl list --columns id 2>/dev/null | tail -n +2 | tr -d ' '";

std::string Bash(const ProgramHelp& help) {
  std::vector<std::string> names;
  for (const CommandHelp& command : help.commands) names.push_back(command.name);
  std::string text = "# bash completion of " + help.name + "; made by `" + help.name + " completion bash`\n_" + help.name +
                     "() {\n  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command= i\n"
                     "  for ((i = 1; i < COMP_CWORD; i++)); do\n    case ${COMP_WORDS[i]} in\n      " + Joined(names, "|") +
                     ") command=${COMP_WORDS[i]}; break ;;\n    esac\n  done\n  COMPREPLY=()\n  case $command:$before in\n";
  const auto values = [&](const std::string& command, const std::vector<OptionHelp>& options) {
    std::string cases;
    for (const OptionHelp& option : options) {
      if (option.positional || option.words.empty()) continue;
      std::vector<std::string> patterns;
      for (const std::string& name : option.names) patterns.push_back(command + ":" + name);
      cases += "    " + Joined(patterns, "|") + ") COMPREPLY=($(compgen -W " + Quoted(Joined(option.words, " ")) + " -- \"$word\")); return ;;\n";
    }
    return cases;
  };
  for (const CommandHelp& command : help.commands) text += values(command.name, command.options);
  text += values("*", help.options) + "  esac\n  case $command in\n    '') COMPREPLY=($(compgen -W " +
          Quoted(Joined(names, " ") + " " + Joined(FlagNames(help.options), " ")) + " -- \"$word\")) ;;\n";
  for (const CommandHelp& command : help.commands) {
    std::vector<std::string> words = FlagNames(command.options);
    const std::vector<std::string> more = FlagNames(help.options), own = PositionalWords(command);
    words.insert(words.end(), more.begin(), more.end());
    words.insert(words.end(), own.begin(), own.end());
    text += "    " + command.name + ") COMPREPLY=($(compgen -W \"" + Joined(words, " ") + (TakesJob(command) ? " $(" + std::string(kJobNumbers) + ")" : "") +
            "\" -- \"$word\")) ;;\n";
  }
  text += "  esac\n";
  std::vector<std::string> files;
  for (const CommandHelp& command : help.commands) {
    if (TakesFile(command)) files.push_back(command.name);
  }
  if (!files.empty()) text += "  case $command in " + Joined(files, "|") + ") [[ $word == -* ]] || COMPREPLY+=($(compgen -f -- \"$word\")) ;; esac\n";
  return text + "}\ncomplete -o filenames -F _" + help.name + " " + help.name + "\n";
}

std::string ZshText(const std::string& text) {
  std::string plain;
  for (const char c : text) plain += c == '[' || c == ']' || c == ':' || c == '\\' ? std::string("\\") + c : std::string(1, c);
  return plain;
}

std::string ZshOption(const OptionHelp& option) {
  std::string text;
  for (const std::string& name : option.names) {
    std::string spec = name + (option.value.empty() ? "" : name.rfind("--", 0) == 0 ? "=" : "+") + "[" + ZshText(option.about) + "]";
    if (!option.value.empty()) {
      spec += ":" + ZshText(option.value) + ":";
      if (!option.words.empty()) spec += "(" + Joined(option.words, " ") + ")";
    }
    text += " \\\n        " + Quoted((option.many ? "*" : "") + spec);
  }
  return text;
}

std::string Zsh(const ProgramHelp& help) {
  std::string text = "#compdef " + help.name + "\n# made by `" + help.name + " completion zsh`\n_" + help.name + "_jobs() { compadd -- $(" + kJobNumbers +
                     ") }\n_" + help.name + "() {\n  local context state line\n  local -a commands=(\n";
  for (const CommandHelp& command : help.commands) text += "    " + Quoted(command.name + ":" + command.about) + "\n";
  text += "  )\n  _arguments -C";
  for (const OptionHelp& option : help.options) text += ZshOption(option);
  text += " \\\n        '1:command:->command' '*::argument:->argument'\n  case $state in\n    command) _describe command commands ;;\n"
          "    argument)\n      case $words[1] in\n";
  for (const CommandHelp& command : help.commands) {
    text += "        " + command.name + ") _arguments";
    for (const OptionHelp& option : command.options) {
      if (!option.positional) {
        text += ZshOption(option);
        continue;
      }
      const std::string action = option.value == "ID" ? "_" + help.name + "_jobs" : option.value == "FILE" || option.value == "RUN_FOLDER" ? "_files"
                                 : option.words.empty() ? "" : "(" + Joined(option.words, " ") + ")";
      text += " \\\n        " + Quoted(std::string(option.many ? "*" : "") + ":" + ZshText(option.value) + ":" + action);
    }
    for (const OptionHelp& option : help.options) text += ZshOption(option);
    text += " ;;\n";
  }
  return text + "      esac ;;\n  esac\n}\n_" + help.name + " \"$@\"\n";
}

std::string FishOption(const std::string& head, const OptionHelp& option) {
  std::string text = head;
  for (const std::string& name : option.names) text += name.rfind("--", 0) == 0 ? " -l " + name.substr(2) : " -s " + name.substr(1);
  if (!option.value.empty()) text += " -x";
  if (!option.words.empty()) text += " -a " + Quoted(Joined(option.words, " "));
  return text + " -d " + Quoted(option.about) + "\n";
}

std::string Fish(const ProgramHelp& help) {
  std::string text = "# fish completion of " + help.name + "; made by `" + help.name + " completion fish`\ncomplete -c " + help.name + " -f\n";
  for (const OptionHelp& option : help.options) text += FishOption("complete -c " + help.name, option);
  for (const CommandHelp& command : help.commands) {
    text += "complete -c " + help.name + " -n __fish_use_subcommand -a " + command.name + " -d " + Quoted(command.about) + "\n";
    const std::string head = "complete -c " + help.name + " -n '__fish_seen_subcommand_from " + command.name + "'";
    for (const OptionHelp& option : command.options) {
      if (!option.positional) text += FishOption(head, option);
    }
    if (TakesJob(command)) text += head + " -a '(" + std::string("hierctl list --columns id 2>/dev/null | tail -n +2 | string trim") + ")'\n";
    if (TakesFile(command)) text += head + " -F\n";
    if (const auto words = PositionalWords(command); !words.empty()) text += head + " -a " + Quoted(Joined(words, " ")) + "\n";
  }
  return text;
}

// Text of roff: no line begins with a request, backslashes and dashes are themselves.
std::string Roff(const std::string& text) {
  std::string escaped;
  for (const std::string& line : Split(text, '\n')) {
    if (!escaped.empty()) escaped += "\n.br\n";
    if (!line.empty() && (line[0] == '.' || line[0] == '\'')) escaped += "\\&";
    for (const char c : line) escaped += c == '\\' ? std::string("\\e") : c == '-' ? std::string("\\-") : std::string(1, c);
  }
  return escaped;
}

std::string ManOption(const OptionHelp& option) {
  std::string names;
  for (const std::string& name : option.names) names += (names.empty() ? "" : ", ") + std::string("\\fB") + Roff(name) + "\\fR";
  std::string about = option.about;
  if (!option.words.empty()) about += " (" + Joined(option.words, ", ") + ")";
  return ".TP\n" + names + (option.value.empty() ? "" : " \\fI" + Roff(option.value) + "\\fR") + "\n" + Roff(about) + "\n";
}

}  // namespace

std::vector<std::string> FlagNames(const std::vector<OptionHelp>& options) {
  std::vector<std::string> flags;
  for (const OptionHelp& option : options) {
    if (!option.positional) flags.insert(flags.end(), option.names.begin(), option.names.end());
  }
  return flags;
}

absl::StatusOr<std::string> CompletionScript(const ProgramHelp& help, const std::string& shell) {
  if (shell == "bash") return Bash(help);
  if (shell == "zsh") return Zsh(help);
  if (shell == "fish") return Fish(help);
  return absl::InvalidArgumentError("\"" + Printable(shell, 40) + "\" is none of bash, zsh, fish");
}

std::string ManPage(const ProgramHelp& help, const std::string& version) {
  std::string upper = help.name;
  for (char& c : upper) c = c >= 'a' && c <= 'z' ? char(c - 32) : c;
  const size_t colon = help.about.find(": ");
  const std::string about = colon == std::string::npos ? help.about : help.about.substr(colon + 2);
  std::string text = ".TH " + upper + " 1 \"\" \"" + Roff(help.name + " " + version) + "\" \"hierad\"\n.SH NAME\n" + Roff(help.name) + " \\- " + Roff(about) +
                     "\n.SH SYNOPSIS\n.B " + help.name + "\n[\\fIoptions\\fR] \\fIcommand\\fR [\\fIarguments\\fR]\n.SH OPTIONS\n";
  for (const OptionHelp& option : help.options) text += ManOption(option);
  text += ".SH COMMANDS\n";
  for (const CommandHelp& command : help.commands) {
    text += ".SS " + Roff(command.name);
    for (const OptionHelp& option : command.options) {
      if (option.positional) text += " " + Roff(option.value) + (option.many ? "..." : "");
    }
    text += "\n" + Roff(command.about) + ".\n";
    for (const OptionHelp& option : command.options) {
      if (!option.positional) text += ManOption(option);
    }
  }
  return text + ".SH EXIT STATUS\n" + Roff(help.footer) + "\n.SH SEE ALSO\n.BR hierad (8)\n";
}

}  // namespace hierad
