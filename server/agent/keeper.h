// The keeper of one rank: a process of its own (`hierad-agent --keeper`), single-threaded, that starts the worker, ends
// its whole tree and says how it ended. Being the subreaper of the tree, it sees every descendant, whatever those do.
//
//   agent --- socket --- keeper --- fork, exec --- worker and what it starts
//
// - The agent dies (the socket closes without "goodbye"): the tree is killed at once and the keeper goes too.
// - The agent leaves (with "goodbye"): the keeper stays and waits at RANKS/NAME.sock for the next agent.
// - The keeper dies: the worker has PR_SET_PDEATHSIG; what is left is found by kRankVariable and killed by the agent.
// - The worker ends: what it left running is killed, RANKS/NAME.exit is written (a RankProcess; durable until hierad has
//   acknowledged it), and the keeper ends.
// With a control group (cgroup.h) the tree is ended by cgroup.kill first. The worker runs as ACCOUNT
// (base/account.h), with no_new_privs; paths that the job names are opened with the account's rights.
// Not guaranteed without cgroups: processes of a tree whose keeper *and* agent die by SIGKILL live until the next start
// of an agent on the same state folder.
#pragma once

namespace hierad {

// What the agent hands over. Messages are datagrams: down "term MILLISECONDS", "kill", "goodbye"; up a RankProcess when
// a connection is made and when the process has ended.
inline constexpr int kKeeperControlFd = 3;     // SOCK_SEQPACKET to the agent
inline constexpr int kKeeperAssignmentFd = 4;  // memfd: the serialized Assignment
inline constexpr int kKeeperRanksFd = 5;       // folder of NAME.sock and NAME.exit
inline constexpr int kWorkerAssignmentFd = 3;  // where the worker finds its Assignment
inline constexpr int kKeeperMessageBytes = 64 << 10;   // a RankProcess with its last words, many times over

// argv: hierad-agent --keeper NAME WORKER ACCOUNT CGROUP_HOME MEMORY_MAX LOG_BYTES, where ACCOUNT and CGROUP_HOME may be empty and
// MEMORY_MAX 0; a log of more than LOG_BYTES is emptied. The environment is the worker's. Returns the exit status.
int KeeperMain(int argc, char** argv);

}  // namespace hierad
