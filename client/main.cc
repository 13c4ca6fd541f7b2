// hierctl: what the process knows of its terminal and environment, then the command line.
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <string>

#include "client/command_line.h"

namespace {

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

int TerminalColumns() {
  winsize size{};
  return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

int TerminalRows() {
  winsize size{};
  return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_row > 0 ? size.ws_row : 24;
}

bool LocaleIsUtf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const std::string value = Environment(name);
    if (!value.empty()) return value.find("UTF-8") != std::string::npos || value.find("utf8") != std::string::npos;
  }
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  hierad::Context context;
  context.out = &std::cout;
  context.err = &std::cerr;
  context.clock = &hierad::Clock::System();
  context.live = ::isatty(STDOUT_FILENO) == 1 && Environment("TERM") != "dumb" && !Environment("TERM").empty();
  context.color = context.live && Environment("NO_COLOR").empty();
  context.unicode = LocaleIsUtf8();
  context.columns = TerminalColumns;
  context.rows = TerminalRows;
  context.server = Environment("HIERAD_SERVER");
  const int code = hierad::RunCommandLine(argc, argv, context);
  std::cout.flush();
  // Output that did not arrive (a full disk) is no success.
  return code == 0 && !std::cout.good() ? 1 : code;
}
