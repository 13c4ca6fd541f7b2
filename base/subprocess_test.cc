#include "base/subprocess.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>

namespace hierad {
namespace {

using std::chrono::seconds;

SubprocessOptions Shell(const std::string& script) {
  SubprocessOptions options;
  options.argv = {"/bin/sh", "-c", script};
  return options;
}

TEST(Subprocess, CapturesBothStreamsAndTheExitCode) {
  const auto result = RunCommand(Shell("echo out; echo err >&2; exit 3"), seconds(30));
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->out, "out\n");
  EXPECT_EQ(result->err, "err\n");
  EXPECT_EQ(result->exit.code, 3);
  EXPECT_FALSE(result->exit.ok());
  EXPECT_EQ(result->exit.Describe(), "exit code 3");
}

TEST(Subprocess, ArgumentsPassUntouched) {
  SubprocessOptions options;
  options.argv = {"/usr/bin/printf", "%s|", "$(touch /tmp/p)", "a b", "\"'\\", ""};
  EXPECT_EQ(RunCommand(options, seconds(30))->out, "$(touch /tmp/p)|a b|\"'\\||");
}

TEST(Subprocess, MoreOutputThanAPipeHoldsIsReadAndCut) {
  const auto result = RunCommand(Shell("yes x | head -c 300000; yes y | head -c 300000 >&2"), seconds(30), 200000);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->out.size(), 200000u);
  EXPECT_EQ(result->err.size(), 200000u);
  EXPECT_TRUE(result->truncated);
}

TEST(Subprocess, AMissingProgramIsAnErrorOfStart) {
  SubprocessOptions options;
  options.argv = {"/none/such"};
  EXPECT_EQ(Subprocess::Start(options).status().code(), absl::StatusCode::kNotFound);
  options.argv = {"/etc/passwd"};
  EXPECT_EQ(Subprocess::Start(options).status().code(), absl::StatusCode::kPermissionDenied);
  options.argv = {};
  EXPECT_EQ(Subprocess::Start(options).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(Subprocess, EnvironmentAndFolder) {
  SubprocessOptions options = Shell("echo \"$X-${HOME-none}\"; pwd");
  options.env = {"X=1 2"};
  options.folder = "/usr";
  EXPECT_EQ(RunCommand(options, seconds(30))->out, "1 2-none\n/usr\n");
}

TEST(Subprocess, OnlyTheNamedDescriptorIsInherited) {
  int pipe_fds[2];
  ASSERT_EQ(::pipe(pipe_fds), 0);   // without O_CLOEXEC: even so the child must not see it
  UniqueFd read(pipe_fds[0]), write(pipe_fds[1]);
  ASSERT_TRUE(WriteAll(write.get(), "secret", "pipe").ok());
  write.reset();
  UniqueFd stray(::open("/dev/null", O_RDONLY));
  SubprocessOptions options = Shell("cat <&3; echo; exec ls /proc/self/fd");
  options.inherited_fd = read.get();
  const auto result = RunCommand(options, seconds(30));
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->out, "secret\n0\n1\n2\n3\n4\n");   // 4: the folder that ls reads
}

TEST(Subprocess, WaitHasADeadlineAndTheGroupIsKilled) {
  SubprocessOptions options = Shell("sleep 1000 & sleep 1000");
  UniqueFd read, write;
  int pipe_fds[2];
  ASSERT_EQ(::pipe2(pipe_fds, O_CLOEXEC), 0);
  read = UniqueFd(pipe_fds[0]);
  write = UniqueFd(pipe_fds[1]);
  options.stdout_fd = write.get();
  auto child = Subprocess::Start(options);
  ASSERT_TRUE(child.ok()) << child.status();
  write.reset();
  EXPECT_EQ(child->Wait(std::chrono::milliseconds(10)).status().code(), absl::StatusCode::kDeadlineExceeded);
  child->KillGroup(SIGTERM);
  const auto end = child->Wait(seconds(30));
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_EQ(end->signal, SIGTERM);
  EXPECT_EQ(end->Describe(), "killed by signal 15 (Terminated)");
  char byte;
  EXPECT_EQ(::read(read.get(), &byte, 1), 0) << "the end of the pipe: the shell's own child is gone too";
  EXPECT_EQ(child->Wait()->signal, SIGTERM) << "asked again";
  child->KillGroup(SIGKILL);
}

TEST(Subprocess, ItsSignalsAreTheDefaultOnes) {
  struct sigaction ignore = {}, before;
  ignore.sa_handler = SIG_IGN;
  ASSERT_EQ(::sigaction(SIGTERM, &ignore, &before), 0);
  const auto result = RunCommand(Shell("kill -TERM $$; echo alive"), seconds(30));
  ::sigaction(SIGTERM, &before, nullptr);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->exit.signal, SIGTERM);
}

TEST(Subprocess, PastItsTimeACommandIsKilled) {
  const auto result = RunCommand(Shell("sleep 1000"), std::chrono::milliseconds(50));
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(Subprocess, DestroyedWhileRunningItIsKilledAndReaped) {
  pid_t pid;
  {
    auto child = Subprocess::Start(Shell("exec sleep 1000"));
    ASSERT_TRUE(child.ok()) << child.status();
    pid = child->pid();
    Subprocess moved = *std::move(child);
  }
  EXPECT_EQ(::kill(pid, 0), -1);
}

TEST(Subprocess, FindProgram) {
  EXPECT_TRUE(FindProgram("sh").ok());
  EXPECT_EQ(*FindProgram("/bin/sh"), "/bin/sh");
  EXPECT_EQ(FindProgram("/etc/passwd").status().code(), absl::StatusCode::kNotFound);
  const auto none = FindProgram("no-such-program");
  EXPECT_EQ(none.status().code(), absl::StatusCode::kNotFound);
  EXPECT_NE(std::string(none.status().message()).find(*ProgramFolder()), std::string::npos);
}

}  // namespace
}  // namespace hierad
