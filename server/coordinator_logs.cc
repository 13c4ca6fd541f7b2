// Logs of ranks on nodes that share no storage with hierad: asked for with the orders of their agents.
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/limits.h"
#include "server/coordinator.h"

namespace hierad {

void Coordinator::ReadLog(LogPlace place, Reply<LogAnswer> reply) {
  Post([this, place = std::move(place), reply]() mutable { AskForLog(std::move(place), reply); },
       [reply] { reply(absl::UnavailableError("hierad is stopping; try again when it is back")); });
}

void Coordinator::AskForLog(LogPlace place, const Reply<LogAnswer>& reply) {
  std::optional<JobRow> stored;
  const LiveJob* live = Find(place.job_id);
  if (live == nullptr) {
    auto row = store_->Load(place.job_id);
    if (!row.ok()) return reply(row.status());
    stored = *std::move(row);
  }
  LogAnswer missing;
  missing.piece.set_missing(true);
  if (live == nullptr && !stored) return reply(missing);
  const JobRow& row = live != nullptr ? live->row : *stored;
  if (place.rank < 0 || place.rank >= static_cast<int>(row.ranks.size())) return reply(missing);   // no attempt has begun
  const std::string& name = row.ranks[place.rank].node;
  const auto found = nodes_.find(name);
  if (found == nodes_.end() || found->second.session == 0) {
    return reply(absl::UnavailableError(absl::StrCat("the log of rank ", place.rank, " is on node ", name, ", which is not connected")));
  }
  Node& node = found->second;
  if (node.log_reads.size() >= kLogReads) return reply(absl::ResourceExhaustedError(absl::StrCat("at most ", kLogReads, " logs of node ", name, " are read at a time")));
  LogRead& read = node.log_reads[++log_reads_];
  read.wanted.set_id(log_reads_);
  read.wanted.set_job_id(row.id);
  read.wanted.set_rank(place.rank);
  read.wanted.set_run_folder(row.run_folder);
  read.wanted.set_user(row.submitter);
  // What was read of another node's file says nothing of this one's.
  read.wanted.set_offset(place.node.empty() || place.node == name ? place.offset : 0);
  read.wanted.set_tail_lines(place.tail_lines);
  read.until = now_ + kLogWait;
  read.reply = [reply, name](absl::StatusOr<v1::LogPiece> piece) {
    if (!piece.ok()) return reply(piece.status());
    reply(LogAnswer{*std::move(piece), name});
  };
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
      reply(absl::UnavailableError(absl::StrCat("the agent of node ", name, ", where the log is, does not answer")));
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
