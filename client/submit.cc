#include <random>

#include "base/text.h"
#include "client/commands.h"
#include "client/job_file.h"
#include "client/job_json.h"
#include "client/job_text.h"

namespace hierad {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kSubmitPatience{5};     // a restart of hierad takes about one
constexpr seconds kValidateTimeout{2};    // the server's opinion is a bonus

std::string RandomKey() {
  static constexpr char kHex[] = "0123456789abcdef";
  std::random_device device;
  std::string key = "hierctl-";
  for (int word = 0; word < 4; ++word) {
    const uint32_t bits = device();
    for (int shift = 0; shift < 32; shift += 4) key += kHex[bits >> shift & 15];
  }
  return key;
}

// Tries again with the same key while hierad cannot be reached: if the first try did arrive, this makes no second job.
absl::StatusOr<v1::SubmitReply> SubmitWithPatience(Connection& connection, const v1::SubmitRequest& request,
                                                   const Context& context) {
  const auto deadline = context.clock->Monotonic() + kSubmitPatience;
  bool told = false;
  while (true) {
    auto reply = connection.Call(&Connection::Stub::Submit, request);
    if (reply.ok() || !absl::IsUnavailable(reply.status())) return reply;
    if (context.clock->Monotonic() >= deadline) return reply;
    if (!told) *context.err << "hierctl: hierad does not answer; trying for " << kSubmitPatience.count() << " s\n";
    told = true;
    SleepFor(milliseconds(200));
  }
}

}  // namespace

int RefuseFile(const JobFile& file, const Context& context) {
  for (const std::string& problem : file.problems) *context.err << problem << "\n";
  if (context.json) {
    *context.out << JsonText({{"valid", false}, {"problems", file.problems}, {"warnings", Json::array()}});
  }
  return kExitUsage;
}

int Submit(const SubmitOptions& options, const Context& context) {
  const JobFile file = ReadJobFile(options.file, options.set);
  if (!file.problems.empty()) return RefuseFile(file, context);
  if (options.dry_run) {
    if (context.json) *context.out << JsonText({{"valid", true}, {"spec", JsonOf(file.spec)}});
    else *context.out << "# " << JobSummary(file.spec) << "\n" << EffectiveJobYaml(file);
    return kExitOk;
  }
  for (const std::string& missing : MissingFiles(file)) *context.err << "warning: " << missing << "\n";
  auto connection = Connection::Open(context.server);
  if (!connection.ok()) return Fail(connection.status(), context);
  v1::SubmitRequest request;
  *request.mutable_spec() = file.spec;
  request.set_client_key(options.client_key.empty() ? RandomKey() : options.client_key);
  const auto reply = SubmitWithPatience(**connection, request, context);
  if (!reply.ok()) return Fail(reply.status(), context);
  const v1::Job& job = reply->job();
  if (context.json) {
    if (!options.wait || options.follow) *context.out << JsonText({{"job", JsonOf(job)}, {"existed", reply->existed()}});
  } else {
    *context.out << "job " << job.id() << " (" << PrintableSentence(job.spec().name()) << ") "
                 << (reply->existed() ? "is known already" : "is queued") << "; run folder "
                 << PrintableSentence(job.run_folder()) << "\n";
    if (job.state() == v1::QUEUED && !job.message().empty()) *context.out << "it " << PrintableSentence(job.message()) << "\n";
    if (options.follow) *context.out << "Ctrl-C ends the watching, not the job; hierctl cancel " << job.id() << " ends the job\n";
  }
  context.out->flush();
  if (options.follow) return WatchJob(**connection, job.id(), {}, context);
  if (options.wait) return Wait({job.id()}, 0, context);
  return kExitOk;
}

int Validate(const SubmitOptions& options, const Context& context) {
  const JobFile file = ReadJobFile(options.file, options.set);
  if (!file.problems.empty()) return RefuseFile(file, context);
  auto connection = Connection::Open(context.server);
  if (!connection.ok()) return Fail(connection.status(), context);
  v1::ValidateRequest request;
  *request.mutable_spec() = file.spec;
  const auto reply = (*connection)->Call(&Connection::Stub::Validate, request, kValidateTimeout);
  Json problems = Json::array(), warnings = MissingFiles(file);
  if (reply.ok()) {
    for (const std::string& problem : reply->problems()) problems.push_back(PrintableSentence(problem));
    for (const std::string& warning : reply->warnings()) warnings.push_back(PrintableSentence(warning));
  }
  const bool valid = problems.empty();
  if (context.json) {
    *context.out << JsonText({{"valid", valid}, {"problems", problems}, {"warnings", warnings}, {"asked_hierad", reply.ok()}});
    return valid ? kExitOk : kExitUsage;
  }
  for (const Json& problem : problems) *context.err << problem.get<std::string>() << "\n";
  for (const Json& warning : warnings) *context.err << "warning: " << warning.get<std::string>() << "\n";
  if (!valid) return kExitUsage;
  *context.out << PrintableSentence(options.file) << " is valid: " << JobSummary(file.spec) << "\n";
  if (!reply.ok()) *context.out << "(checked by hierctl alone; no hierad was asked)\n";
  return kExitOk;
}

}  // namespace hierad
