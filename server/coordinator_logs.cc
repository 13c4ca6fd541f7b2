// Logs of ranks on nodes that share no storage with hierad: asked for with the orders of their agents.
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/limits.h"
#include "base/text.h"
#include "server/coordinator.h"

namespace hierad {

void Coordinator::AttemptsOf(uint64_t job_id, int rank, int known, Reply<LogAttempts> reply) {
  Ask<LogAttempts>(reply, [this, job_id, rank, known]() -> absl::StatusOr<LogAttempts> {
    std::optional<JobRow> stored;
    const LiveJob* live = Find(job_id);
    if (live == nullptr) {
      auto row = store_->Load(job_id);
      if (!row.ok()) return row.status();
      if (!*row) return absl::NotFoundError(absl::StrCat("there is no job ", job_id));
      stored = **std::move(row);
    }
    const JobRow& row = live != nullptr ? live->row : *stored;
    LogAttempts answer;
    answer.terminal = IsTerminal(row.state);
    if (row.attempt <= known) return answer;
    auto past = store_->Attempts(job_id);
    if (!past.ok()) return past.status();
    for (const AttemptRow& attempt : *past) {
      if (attempt.attempt <= known || attempt.attempt >= row.attempt) continue;
      const std::vector<std::string> nodes = absl::StrSplit(attempt.nodes, ' ', absl::SkipEmpty());
      answer.attempts.push_back({attempt.attempt, rank < static_cast<int>(nodes.size()) ? nodes[rank] : ""});
    }
    answer.attempts.push_back({row.attempt, rank < static_cast<int>(row.ranks.size()) ? row.ranks[rank].node : ""});
    return answer;
  });
}

void Coordinator::ReadLog(std::string node, v1::LogWanted wanted, Reply<v1::LogPiece> reply) {
  Post([this, node = std::move(node), wanted = std::move(wanted), reply] { AskForLog(node, wanted, reply); },
       [reply] { reply(StoppedError()); });
}

void Coordinator::AskForLog(const std::string& name, const v1::LogWanted& wanted, const Reply<v1::LogPiece>& reply) {
  const auto found = nodes_.find(name);
  if (found == nodes_.end() || found->second.session == 0) return reply(absl::UnavailableError(absl::StrCat("node ", Printable(name), " is not connected")));
  Node& node = found->second;
  if (node.log_reads.size() >= kLogReads) return reply(absl::ResourceExhaustedError(absl::StrCat("at most ", kLogReads, " logs of node ", name, " are read at a time")));
  LogRead& read = node.log_reads[++log_reads_];
  read.wanted = wanted;
  read.wanted.set_id(log_reads_);
  read.until = now_ + kLogWait;
  read.reply = reply;
  node.orders_due = true;
}

void Coordinator::TakeLogPieces(Node* node, const v1::AgentReport& report) {
  for (const v1::LogPiece& piece : report.log_pieces()) {
    const auto read = node->log_reads.find(piece.id());
    if (read == node->log_reads.end()) continue;   // sent again
    const auto reply = std::move(read->second.reply);
    node->log_reads.erase(read);
    node->orders_due = true;
    reply(piece);
  }
}

void Coordinator::GiveUpLogs() {
  for (auto& [name, node] : nodes_) {
    for (auto read = node.log_reads.begin(); read != node.log_reads.end();) {
      if (now_ < read->second.until && node.session != 0) {
        ++read;
        continue;
      }
      const auto reply = std::move(read->second.reply);
      read = node.log_reads.erase(read);
      node.orders_due = true;
      reply(absl::UnavailableError(absl::StrCat("the agent of node ", name, " does not answer")));
    }
  }
}

void Coordinator::AddLogsWanted(const Node& node, v1::AgentOrders* orders) {
  for (const auto& [id, read] : node.log_reads) {
    if (orders->logs_size() >= limits::kLogPieces) return;
    *orders->add_logs() = read.wanted;
  }
}

}  // namespace hierad
