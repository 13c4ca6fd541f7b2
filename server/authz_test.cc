// Who may call what, over real listeners: every RPC against every kind of wrong certificate, and users on a shared socket.
#include "server/authz.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/channel/certificates.h"
#include "base/channel/channel.h"
#include "base/channel/peer_token.h"
#include "base/subprocess.h"
#include "hierad/v1/agent.grpc.pb.h"
#include "hierad/v1/control.grpc.pb.h"
#include "server/config.h"
#include "server/rpc_server.h"

namespace hierad {
namespace {

using testing::HasSubstr;
using Credentials = std::shared_ptr<grpc::ChannelCredentials>;

// Every method that is served, from the files of proto/.
std::vector<std::string> Methods() {
  std::vector<std::string> methods;
  for (const auto& entry : std::filesystem::directory_iterator(std::string(std::getenv("HIERAD_SOURCE_DIR")) + "/proto/hierad/v1")) {
    const auto* file = google::protobuf::DescriptorPool::generated_pool()->FindFileByName("hierad/v1/" + entry.path().filename().string());
    for (int s = 0; file != nullptr && s < file->service_count(); ++s) {
      for (int m = 0; m < file->service(s)->method_count(); ++m) {
        methods.push_back(absl::StrCat("/", file->service(s)->full_name(), "/", file->service(s)->method(m)->name()));
      }
    }
  }
  return methods;
}

// One empty request; the status that comes back.
grpc::Status CallEmpty(const std::shared_ptr<grpc::Channel>& channel, const std::string& method) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  grpc::CompletionQueue queue;
  const grpc::Slice nothing;
  grpc::ByteBuffer request(&nothing, 1), reply;
  auto call = stub.PrepareUnaryCall(&context, method, request, &queue);
  call->StartCall();
  grpc::Status status;
  call->Finish(&reply, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  return status;
}

// Sets a certificate's end into the past and signs it again.
void Expire(const std::string& certificate, const std::string& ca_key) {
  FILE* file = fopen(certificate.c_str(), "r");
  X509* x509 = PEM_read_X509(file, nullptr, nullptr, nullptr);
  fclose(file);
  file = fopen(ca_key.c_str(), "r");
  EVP_PKEY* key = PEM_read_PrivateKey(file, nullptr, nullptr, nullptr);
  fclose(file);
  ASSERT_TRUE(x509 != nullptr && key != nullptr);
  X509_gmtime_adj(X509_getm_notBefore(x509), -7200);
  X509_gmtime_adj(X509_getm_notAfter(x509), -3600);
  ASSERT_GT(X509_sign(x509, key, EVP_sha256()), 0);
  file = fopen(certificate.c_str(), "w");
  ASSERT_EQ(PEM_write_X509(file, x509), 1);
  fclose(file);
  X509_free(x509);
  EVP_PKEY_free(key);
}

class AuthzTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string path = "/tmp/hierad_authz_XXXXXX";
    folder_ = mkdtemp(path.data());
    ASSERT_EQ(chmod(folder_.c_str(), 0755), 0);
  }
  void TearDown() override {
    if (server_) server_->Stop();
    server_.reset();
    if (loop_.joinable()) {
      coordinator_->Stop();
      loop_.join();
    }
    coordinator_.reset();
    std::filesystem::remove_all(folder_);
  }
  void Certs(std::vector<std::string> words, const std::string& authority = "pki") {
    words.insert(words.begin(), {std::string(std::getenv("HIERAD_SOURCE_DIR")) + "/deploy/certs", folder_ + "/" + authority});
    const auto made = RunCommand({.argv = words}, std::chrono::seconds(60));
    ASSERT_TRUE(made.ok() && made->exit.ok()) << (made.ok() ? made->err : std::string(made.status().message()));
  }
  v1::Certificates Read(const std::string& name, const std::string& authority = "pki") {
    auto read = ReadCertificates(folder_ + "/" + authority + "/" + name);
    EXPECT_TRUE(read.ok()) << read.status();
    return read.value_or(v1::Certificates());
  }
  void Start(bool tcp, const std::string& access = "owner") {
    auto store = Store::Open(folder_ + "/hierad.db");
    ASSERT_TRUE(store.ok()) << store.status();
    CoordinatorOptions options;
    options.runs_folder = folder_ + "/runs";
    auto coordinator = Coordinator::Create(options, *std::move(store), &Clock::System());
    ASSERT_TRUE(coordinator.ok()) << coordinator.status();
    coordinator_ = *std::move(coordinator);
    loop_ = std::thread([this] { coordinator_->Run(); });
    RpcServerOptions server;
    server.listen = Socket();
    server.access = access;
    server.owner = UserName(geteuid());
    server.certificates = folder_ + "/pki/server";
    // Ports are ours only once bound: another test may take one that was free a moment ago.
    for (int tries = 0; tries < 50; ++tries) {
      port_ = 20000 + static_cast<int>((static_cast<unsigned>(getpid()) * 7 + static_cast<unsigned>(tries) * 131) % 12000);
      if (tcp) server.tcp = absl::StrCat("127.0.0.1:", port_);
      auto started = RpcServer::Start(server, coordinator_.get(), &Clock::System());
      if (started.ok()) {
        server_ = *std::move(started);
        return;
      }
      ASSERT_TRUE(tcp && absl::IsUnavailable(started.status())) << started.status();
    }
    FAIL() << "no free port";
  }
  std::string Socket() const { return "unix:" + folder_ + "/hierad.sock"; }
  // A connection of its own.
  std::shared_ptr<grpc::Channel> Tcp(const Credentials& credentials) {
    grpc::ChannelArguments own;
    own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", port_), credentials, own);
  }
  std::shared_ptr<grpc::Channel> Tcp(const v1::Certificates& certificates) {
    return Tcp(*CredentialsFor(absl::StrCat("127.0.0.1:", port_), certificates));
  }
  std::shared_ptr<grpc::Channel> As(const std::string& name) { return Tcp(Read(name)); }

  static grpc::Status Submit(const std::shared_ptr<grpc::Channel>& channel, const std::string& key, v1::Job* job, const std::string& token = "") {
    grpc::ClientContext context;
    if (!token.empty()) context.AddMetadata(kPeerTokenKey, token);
    v1::SubmitRequest request;
    request.set_client_key(key);
    request.mutable_spec()->set_name("job");
    request.mutable_spec()->mutable_data()->set_source("synthetic");
    request.mutable_spec()->mutable_schedule()->set_steps(5);
    v1::SubmitReply reply;
    const grpc::Status status = v1::ControlService::NewStub(channel)->Submit(&context, request, &reply);
    *job = reply.job();
    return status;
  }
  static grpc::Status Get(const std::shared_ptr<grpc::Channel>& channel, uint64_t id, const std::string& token = "") {
    grpc::ClientContext context;
    if (!token.empty()) context.AddMetadata(kPeerTokenKey, token);
    v1::GetRequest request;
    request.set_job_id(id);
    v1::Job job;
    return v1::ControlService::NewStub(channel)->Get(&context, request, &job);
  }
  static int Listed(const std::shared_ptr<grpc::Channel>& channel, const std::string& token = "") {
    grpc::ClientContext context;
    if (!token.empty()) context.AddMetadata(kPeerTokenKey, token);
    v1::ListReply reply;
    return v1::ControlService::NewStub(channel)->List(&context, v1::ListRequest(), &reply).ok() ? reply.jobs_size() : -1;
  }
  static grpc::Status Cancel(const std::shared_ptr<grpc::Channel>& channel, uint64_t id) {
    grpc::ClientContext context;
    v1::CancelRequest request;
    request.set_job_id(id);
    v1::Job job;
    return v1::ControlService::NewStub(channel)->Cancel(&context, request, &job);
  }
  // How an agent's session as that node ends, or OK once orders have come.
  static grpc::Status Agent(const std::shared_ptr<grpc::Channel>& channel, const std::string& node) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    auto stub = v1::AgentService::NewStub(channel);
    auto stream = stub->Session(&context);
    v1::AgentReport report;
    report.set_node(node);
    report.set_instance("i");
    report.add_slots()->set_id("cpu-0");
    report.mutable_slots(0)->set_kind(v1::Slot::CPU);
    stream->Write(report);
    v1::AgentOrders orders;
    if (stream->Read(&orders)) {
      context.TryCancel();
      stream->Finish();
      return grpc::Status::OK;
    }
    return stream->Finish();
  }

  std::string folder_;
  int port_ = 0;
  std::unique_ptr<Coordinator> coordinator_;
  std::thread loop_;
  std::unique_ptr<RpcServer> server_;
};

TEST(AuthzTable, HasARuleForEveryRpcAndNoOther) {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(std::string(std::getenv("HIERAD_SOURCE_DIR")) + "/proto/hierad/v1")) {
    files.push_back("hierad/v1/" + entry.path().filename().string());
  }
  EXPECT_THAT(TableErrors(files), testing::IsEmpty());
  EXPECT_GE(Methods().size(), 12u);
  // It sees what is missing: a file left out leaves its rules without methods.
  EXPECT_THAT(TableErrors({}), testing::Not(testing::IsEmpty()));
  EXPECT_EQ(RolesFor("/hierad.v1.ControlService/Delete"), 0u);
}

TEST_F(AuthzTest, EveryRpcRefusesEveryWrongCertificate) {
  Certs({"ca"});
  Certs({"server", "localhost", "127.0.0.1"});
  Certs({"ca"}, "others");
  Certs({"admin", "eve"}, "others");
  for (const char* role : {"viewer", "submitter", "admin", "agent", "worker"}) Certs({role, "n"});
  Certs({"admin", "old"});
  Expire(folder_ + "/pki/admin-old/tls.crt", folder_ + "/pki/ca/ca.key");
  Start(true);
  const std::string ca = Read("admin-n").ca();
  v1::Certificates foreign = Read("admin-eve", "others");
  foreign.set_ca(ca);   // it trusts the server; the server does not trust it
  v1::Certificates no_role = Read("server");
  const std::map<std::string, std::shared_ptr<grpc::Channel>> refused_at_the_door = {
      {"no TLS", Tcp(grpc::InsecureChannelCredentials())},
      {"no certificate", Tcp(grpc::SslCredentials({ca, "", ""}))},
      {"wrong authority", Tcp(foreign)},
      {"expired", Tcp(Read("admin-old"))},
      {"no role", Tcp(no_role)},
  };
  std::map<Role, std::shared_ptr<grpc::Channel>> roles = {{kViewer, As("viewer-n")}, {kSubmitter, As("submitter-n")}, {kAdmin, As("admin-n")},
                                                          {kAgent, As("agent-n")}, {kWorker, As("worker-n")}};
  std::vector<std::string> methods = Methods();
  methods.push_back("/grpc.health.v1.Health/Check");
  methods.push_back("/hierad.v1.ControlService/NoSuchMethod");
  for (const std::string& method : methods) {
    for (const auto& [what, channel] : refused_at_the_door) {
      const grpc::StatusCode code = CallEmpty(channel, method).error_code();
      EXPECT_TRUE(code == grpc::UNAVAILABLE || code == grpc::UNAUTHENTICATED) << method << ", " << what << ": " << code;
    }
    for (const auto& [role, channel] : roles) {
      const grpc::Status status = CallEmpty(channel, method);
      if ((RolesFor(method) & role) != 0) {
        EXPECT_NE(status.error_code(), grpc::PERMISSION_DENIED) << method << " by " << role << ": " << status.error_message();
        EXPECT_NE(status.error_code(), grpc::UNAUTHENTICATED) << method << " by " << role << ": " << status.error_message();
        EXPECT_NE(status.error_code(), grpc::UNAVAILABLE) << method << " by " << role << ": " << status.error_message();
      } else {
        EXPECT_EQ(status.error_code(), grpc::PERMISSION_DENIED) << method << " by " << role << ": " << status.error_message();
      }
    }
  }
  EXPECT_THAT(CallEmpty(roles[kViewer], "/hierad.v1.ControlService/Cancel").error_message(),
              HasSubstr("is for the role submitter or admin; you are viewer \"n\""));
  // And a client does not take anybody for hierad: this server's name is not in its certificate.
  EXPECT_EQ(CallEmpty(grpc::CreateChannel(absl::StrCat("127.0.0.2:", port_), *CredentialsFor("127.0.0.2:1", Read("admin-n"))),
                      "/hierad.v1.ControlService/Version").error_code(), grpc::UNAVAILABLE);
}

TEST_F(AuthzTest, ASubmitterReachesItsOwnJobsOnly) {
  Certs({"ca"});
  Certs({"server", "127.0.0.1"});
  for (const char* name : {"alice", "bob"}) Certs({"submitter", name});
  Certs({"viewer", "wall"});
  Certs({"admin", "root"});
  Start(true);
  const auto alice = As("submitter-alice"), bob = As("submitter-bob"), wall = As("viewer-wall"), root = As("admin-root");
  v1::Job job, other;
  ASSERT_TRUE(Submit(alice, "k", &job).ok());
  EXPECT_EQ(job.submitter(), "alice");
  EXPECT_EQ(Submit(bob, "k", &other).error_code(), grpc::ALREADY_EXISTS);
  EXPECT_EQ(other.id(), 0u);
  for (const auto& channel : {alice, wall, root}) {
    EXPECT_TRUE(Get(channel, job.id()).ok());
    EXPECT_EQ(Listed(channel), 1);
  }
  const grpc::Status refused = Get(bob, job.id());
  EXPECT_EQ(refused.error_code(), grpc::PERMISSION_DENIED);
  EXPECT_THAT(refused.error_message(), HasSubstr("alice's, and you are bob"));
  EXPECT_EQ(Listed(bob), 0);
  EXPECT_EQ(Cancel(bob, job.id()).error_code(), grpc::PERMISSION_DENIED);
  auto stub = v1::ControlService::NewStub(bob);
  {
    grpc::ClientContext context;
    v1::WatchRequest request;
    request.set_job_id(job.id());
    EXPECT_EQ(stub->Watch(&context, request)->Finish().error_code(), grpc::PERMISSION_DENIED);
  }
  {
    grpc::ClientContext context;
    v1::LogsRequest request;
    request.set_job_id(job.id());
    EXPECT_EQ(stub->Logs(&context, request)->Finish().error_code(), grpc::PERMISSION_DENIED);
  }
  {
    grpc::ClientContext context;
    v1::ListCheckpointsRequest request;
    request.set_job_id(job.id());
    v1::ListCheckpointsReply reply;
    EXPECT_EQ(stub->ListCheckpoints(&context, request, &reply).error_code(), grpc::PERMISSION_DENIED);
  }
  EXPECT_EQ(Cancel(wall, job.id()).error_code(), grpc::PERMISSION_DENIED);
  EXPECT_TRUE(Cancel(alice, job.id()).ok());
}

TEST_F(AuthzTest, AnAgentSpeaksForItsOwnNodeOnly) {
  Certs({"ca"});
  Certs({"server", "127.0.0.1"});
  Certs({"agent", "node-1"});
  Start(true);
  const auto agent = As("agent-node-1");
  EXPECT_TRUE(Agent(agent, "node-1").ok());
  const grpc::Status refused = Agent(agent, "node-2");
  EXPECT_EQ(refused.error_code(), grpc::PERMISSION_DENIED);
  EXPECT_THAT(refused.error_message(), HasSubstr("--node node-1"));
}

TEST_F(AuthzTest, CertificatesAreTakenAnewWithoutARestart) {
  Certs({"ca"});
  Certs({"server", "127.0.0.1"});
  Certs({"admin", "n"});
  Start(true);
  EXPECT_GE(Listed(As("admin-n")), 0);
  const v1::Certificates old = Read("admin-n");
  // Another authority altogether: everything is exchanged, and who belongs to the old one is out.
  Certs({"ca"}, "next");
  Certs({"server", "127.0.0.1"}, "next");
  Certs({"admin", "n"}, "next");
  for (const char* file : {kCaFile, kCertificateFile, kKeyFile}) {
    std::filesystem::rename(folder_ + "/next/server/" + file, folder_ + "/pki/server/" + file);
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (Listed(Tcp(Read("admin-n", "next"))) < 0 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  EXPECT_GE(Listed(Tcp(Read("admin-n", "next"))), 0);
  EXPECT_LT(Listed(Tcp(old)), 0);
}

TEST_F(AuthzTest, AKeyThatEveryoneMayReadIsRefused) {
  Certs({"ca"});
  Certs({"admin", "n"});
  ASSERT_EQ(chmod((folder_ + "/pki/admin-n/tls.key").c_str(), 0644), 0);
  EXPECT_THAT(std::string(ReadCertificates(folder_ + "/pki/admin-n").status().message()), HasSubstr("may be read by everyone"));
  EXPECT_THAT(std::string(CredentialsFor("host:1", {}).status().message()), HasSubstr("speaks TLS only"));
}

// The token of another user, fetched by a process of that user.
std::string TokenAs(uid_t uid, const std::string& socket) {
  int ends[2];
  if (pipe(ends) != 0) return "";
  const pid_t pid = fork();
  if (pid == 0) {
    if (setgid(uid) != 0 || setuid(uid) != 0) _exit(1);
    const std::string token = FetchPeerToken(socket);
    _exit(write(ends[1], token.data(), token.size()) == ssize_t(token.size()) ? 0 : 1);
  }
  close(ends[1]);
  char token[kPeerTokenBytes + 1] = "";
  size_t got = 0;
  for (ssize_t n; got < kPeerTokenBytes && (n = read(ends[0], token + got, kPeerTokenBytes - got)) > 0;) got += size_t(n);
  close(ends[0]);
  waitpid(pid, nullptr, 0);
  return token;
}

TEST_F(AuthzTest, ASharedSocketKnowsItsUsers) {
  Start(false, "everyone");
  const std::string path = Socket().substr(5);
  const auto plain = grpc::CreateChannel(Socket(), grpc::experimental::LocalCredentials(UDS));
  // Without a token: a stranger. (A rank's session has a secret of its own.)
  EXPECT_EQ(Get(plain, 1).error_code(), grpc::PERMISSION_DENIED);
  EXPECT_EQ(CallEmpty(plain, "/hierad.v1.AgentService/Session").error_code(), grpc::PERMISSION_DENIED);
  EXPECT_EQ(CallEmpty(plain, "/hierad.v1.WorkerService/Session").error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_EQ(Get(plain, 1, std::string(kPeerTokenBytes, '0')).error_code(), grpc::UNAUTHENTICATED);
  // hierad's own user, as hierctl connects.
  const auto own = grpc::CreateChannel(Socket(), *CredentialsFor(Socket(), {}));
  v1::Job mine, theirs;
  ASSERT_TRUE(Submit(own, "mine", &mine).ok());
  EXPECT_EQ(mine.submitter(), UserName(geteuid()));
  EXPECT_TRUE(Agent(own, "n").ok());
  if (geteuid() != 0) {
    std::fprintf(stderr, "not run here, for want of root: another user on the socket\n");
    return;
  }
  const std::string token = TokenAs(65534, path);
  ASSERT_EQ(token.size(), kPeerTokenBytes);
  EXPECT_NE(token, FetchPeerToken(path));
  ASSERT_TRUE(Submit(plain, "theirs", &theirs, token).ok());
  EXPECT_EQ(theirs.submitter(), UserName(65534));
  EXPECT_EQ(Get(plain, mine.id(), token).error_code(), grpc::PERMISSION_DENIED);
  EXPECT_EQ(Listed(plain, token), 1);
  EXPECT_TRUE(Get(own, theirs.id()).ok());
  EXPECT_EQ(Listed(own), 2);
}

TEST_F(AuthzTest, APrivateSocketNeedsNoToken) {
  Start(false);
  EXPECT_FALSE(std::filesystem::exists(PeerSocketPath(Socket().substr(5))));
  for (const Credentials& credentials : {grpc::InsecureChannelCredentials(), *CredentialsFor(Socket(), {})}) {
    grpc::ChannelArguments own;
    own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    EXPECT_EQ(Listed(grpc::CreateCustomChannel(Socket(), credentials, own)), 0);
  }
}

TEST_F(AuthzTest, ASharedSocketThatNobodyCanReachIsRefused) {
  ASSERT_EQ(chmod(folder_.c_str(), 0700), 0);
  auto store = Store::Open(folder_ + "/hierad.db");
  ASSERT_TRUE(store.ok());
  CoordinatorOptions options;
  options.runs_folder = folder_ + "/runs";
  auto coordinator = Coordinator::Create(options, *std::move(store), &Clock::System());
  ASSERT_TRUE(coordinator.ok());
  RpcServerOptions server;
  server.listen = Socket();
  server.access = "everyone";
  EXPECT_THAT(std::string(RpcServer::Start(server, coordinator->get(), &Clock::System()).status().message()), HasSubstr("others cannot enter"));
  server.access = "group";
  server.access_group = "no-such-group";
  EXPECT_THAT(std::string(RpcServer::Start(server, coordinator->get(), &Clock::System()).status().message()), HasSubstr("no-such-group"));
}

}  // namespace
}  // namespace hierad
