#include "worker/comm/tcp_links.h"

#include <algorithm>
#include <arpa/inet.h>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <random>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/status.h"
#include "base/text.h"

namespace hierad {
namespace {

constexpr char kPrefix[] = "hierad-tcp-1";
constexpr char kMagic[8] = {'h', 'i', 'e', 'r', 'a', 'T', '0', '1'};
constexpr size_t kTokenBytes = 32;
constexpr std::chrono::milliseconds kBeatEvery{200};
constexpr std::chrono::milliseconds kLook{50};             // between two looks for a stop
constexpr std::chrono::seconds kHelloTimeout{10};          // for a stranger to say who it is
constexpr size_t kStrangers = 256;                         // connections that have not said so yet; then the oldest goes
constexpr uint32_t kData = 0, kControl = 1;
constexpr uint32_t kBeat = 1, kVerdict = 2;
constexpr int kBacklog = 256;

// What a connecting rank says first.
struct Hello {
  char magic[8];
  char token[kTokenBytes];
  uint32_t rank, size, channel, pid;
};
static_assert(sizeof(Hello) == 56);

std::chrono::nanoseconds Now() { return Clock::System().Monotonic(); }

double Seconds(std::chrono::nanoseconds t) { return std::chrono::duration<double>(t).count(); }

std::string ErrnoText(int error) {
  char text[128] = "";
  return strerror_r(error, text, sizeof text);
}

std::string NewToken() {
  std::random_device random;
  std::string token;
  while (token.size() < kTokenBytes) {
    char word[9];
    std::snprintf(word, sizeof word, "%08x", random());
    token += word;
  }
  return token;
}

bool SameToken(const char* a, const std::string& b) {
  unsigned char difference = 0;
  for (size_t i = 0; i < kTokenBytes; ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

struct Blob {
  long pid = 0;
  int fd = -1, port = 0;
  std::string token, host;
};

// hierad-tcp-1 PID FD TOKEN PORT HOST
bool ParseBlob(const std::string& text, Blob* blob) {
  const std::vector<std::string> words = Split(text, ' ');
  const auto number = [](const std::string& word, auto* value) {
    return std::from_chars(word.data(), word.data() + word.size(), *value).ptr == word.data() + word.size() && !word.empty();
  };
  if (words.size() != 6 || words[0] != kPrefix || words[3].size() != kTokenBytes) return false;
  blob->token = words[3];
  blob->host = words[5];
  return number(words[1], &blob->pid) && number(words[2], &blob->fd) && number(words[4], &blob->port);
}

addrinfo* Resolve(const std::string& host, const std::string& port, int type, int flags, std::string* error) {
  addrinfo hints{};
  hints.ai_socktype = type;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  const int code = getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
  if (code != 0) *error = gai_strerror(code);
  return code == 0 ? found : nullptr;
}

std::string AddressText(const sockaddr* address, socklen_t size) {
  char host[NI_MAXHOST] = "";
  return getnameinfo(address, size, host, sizeof host, nullptr, 0, NI_NUMERICHOST) == 0 ? host : "?";
}

void Prepare(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

}  // namespace

struct TcpLinks::Message {
  uint32_t kind, pid;
  char text[504];
};

absl::StatusOr<std::string> TcpLinks::Listen(const std::string& address) {
  std::string why;
  addrinfo* found = Resolve(address, "0", SOCK_STREAM, AI_PASSIVE | AI_NUMERICHOST, &why);
  UniqueFd fd;
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  if (found != nullptr) {
    fd = UniqueFd(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd || bind(fd.get(), found->ai_addr, found->ai_addrlen) != 0 || listen(fd.get(), kBacklog) != 0 ||
        getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &size) != 0) {
      why = ErrnoText(errno);
    }
    freeaddrinfo(found);
  }
  if (!why.empty()) return ErrorOf(v1::REASON_INTERNAL, absl::StrCat("rank 0 cannot listen at ", address, ": ", why));
  const int port = ntohs(own.ss_family == AF_INET ? reinterpret_cast<sockaddr_in*>(&own)->sin_port
                                                  : reinterpret_cast<sockaddr_in6*>(&own)->sin6_port);
  return absl::StrCat(kPrefix, " ", getpid(), " ", fd.release(), " ", NewToken(), " ", port, " ", address);
}

absl::StatusOr<std::unique_ptr<TcpLinks>> TcpLinks::Join(const CommunicatorOptions& options, const std::string& rendezvous) {
  Blob blob;
  if (!ParseBlob(rendezvous, &blob)) {
    return absl::InternalError("the rendezvous of the CPU ranks is not one of this version; all ranks must run the same hiera-worker");
  }
  std::unique_ptr<TcpLinks> links(new TcpLinks(options));
  if (!links->wake_) return ErrnoStatus(errno, "cannot make an eventfd", "tcp");
  if (options.rank == 0) {
    if (blob.pid != getpid()) return absl::InternalError("rank 0 joins in the process that made the rendezvous");
    RETURN_IF_ERROR(links->Accept(UniqueFd(blob.fd), blob.token));
  } else {
    RETURN_IF_ERROR(links->Connect(blob.host, blob.port, blob.token));
  }
  for (Link& link : links->links_) link.seen = Now();
  links->thread_ = std::thread([l = links.get()] { l->Run(); });
  return links;
}

TcpLinks::TcpLinks(const CommunicatorOptions& options)
    : options_(options), links_(size_t(options.size)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

TcpLinks::~TcpLinks() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof one);
  thread_.join();
}

absl::Status TcpLinks::Abandoned(const std::string& what) const {
  if (options_.abandon == nullptr || !options_.abandon->load()) return absl::OkStatus();
  return ErrorOf(v1::REASON_CANCELLED, absl::StrCat("rank ", options_.rank, " gave up ", what));
}

std::string TcpLinks::MissingAtJoin() const {
  std::vector<std::string> missing;
  for (int r = 1; r < options_.size; ++r) {
    const Link& link = links_[size_t(r)];
    if (!link.data || !link.control) missing.push_back(absl::StrCat("rank ", r));
  }
  return absl::StrJoin(missing, ", ");
}

absl::Status TcpLinks::Accept(UniqueFd listener, const std::string& token) {
  struct Stranger {
    UniqueFd fd;
    std::string where;
    std::chrono::nanoseconds since;
    Hello hello;
    size_t got = 0;
  };
  std::vector<Stranger> strangers;
  const auto begin = Now();
  // Of a whole hello: takes its place if it is one of ours.
  const auto introduce = [&](Stranger* s) {
    const Hello& h = s->hello;
    if (std::memcmp(h.magic, kMagic, sizeof kMagic) != 0 || !SameToken(h.token, token)) return;
    if (h.rank < 1 || h.rank >= uint32_t(options_.size) || h.size != uint32_t(options_.size) || h.channel > kControl) return;
    Link& link = links_[h.rank];
    UniqueFd& place = h.channel == kData ? link.data : link.control;
    if (place) return;
    place = std::move(s->fd);
    link.pid = int(h.pid);
    link.where = s->where;
  };
  while (!MissingAtJoin().empty()) {
    RETURN_IF_ERROR(Abandoned("waiting for the others to join"));
    if (Now() - begin >= options_.join_timeout) {
      const std::string why = absl::StrCat("rank 0 waiting in rendezvous: ", MissingAtJoin(), " has not joined within ",
                                           Seconds(options_.join_timeout), " s; see whether its node reaches this one, and its log");
      SendVerdict(why);
      return ErrorOf(v1::REASON_PEER_LOST, why);
    }
    std::vector<pollfd> fds = {{listener.get(), POLLIN, 0}};
    for (const Stranger& s : strangers) fds.push_back({s.fd.get(), POLLIN, 0});
    poll(fds.data(), fds.size(), int(kLook.count()));
    for (size_t i = 1; i < fds.size(); ++i) {
      Stranger& s = strangers[i - 1];
      if (fds[i].revents != 0) {
        const ssize_t n = recv(s.fd.get(), reinterpret_cast<char*>(&s.hello) + s.got, sizeof(Hello) - s.got, 0);
        if (n > 0) s.got += size_t(n);
        const bool gone = n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
        if (s.got == sizeof(Hello)) introduce(&s);
        if (gone || s.got == sizeof(Hello)) s.fd.reset();
      }
      if (Now() - s.since > kHelloTimeout) s.fd.reset();
    }
    std::erase_if(strangers, [](const Stranger& s) { return !s.fd; });
    sockaddr_storage from{};
    socklen_t size = sizeof from;
    UniqueFd fd(accept4(listener.get(), reinterpret_cast<sockaddr*>(&from), &size, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) continue;
    Prepare(fd.get());
    if (strangers.size() >= kStrangers) strangers.erase(strangers.begin());
    strangers.push_back({std::move(fd), AddressText(reinterpret_cast<sockaddr*>(&from), size), Now(), {}, 0});
  }
  // Nothing has been sent on these connections yet, so one byte fits.
  for (int r = 1; r < options_.size; ++r) send(data(r), "w", 1, MSG_NOSIGNAL);
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> TcpLinks::Dial(const std::string& host, int port, const std::string& token, uint32_t channel,
                                        std::chrono::nanoseconds deadline) const {
  const std::string where = absl::StrCat("rank ", options_.rank, " cannot reach rank 0 at ", host, ":", port, ": ");
  std::string why;
  addrinfo* found = Resolve(host, absl::StrCat(port), SOCK_STREAM, AI_NUMERICHOST, &why);
  if (found == nullptr) return ErrorOf(v1::REASON_PEER_LOST, absl::StrCat(where, why));
  UniqueFd fd(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  int error = fd && connect(fd.get(), found->ai_addr, found->ai_addrlen) == 0 ? 0 : errno;
  freeaddrinfo(found);
  while (error == EINPROGRESS) {
    RETURN_IF_ERROR(Abandoned("joining"));
    pollfd ready{fd.get(), POLLOUT, 0};
    if (poll(&ready, 1, int(kLook.count())) > 0) {
      socklen_t size = sizeof error;
      getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    } else if (Now() >= deadline) {
      error = ETIMEDOUT;
    }
  }
  if (error != 0) {
    return ErrorOf(v1::REASON_PEER_LOST, absl::StrCat(where, ErrnoText(error), "; ranks of several nodes need to reach each "
                                                      "other's ports: see the firewall, and rank 0's log"));
  }
  Prepare(fd.get());
  Hello hello{};
  std::memcpy(hello.magic, kMagic, sizeof kMagic);
  std::memcpy(hello.token, token.data(), kTokenBytes);
  hello.rank = uint32_t(options_.rank);
  hello.size = uint32_t(options_.size);
  hello.channel = channel;
  hello.pid = uint32_t(getpid());
  if (send(fd.get(), &hello, sizeof hello, MSG_NOSIGNAL) != ssize_t(sizeof hello)) {
    return ErrorOf(v1::REASON_PEER_LOST, absl::StrCat(where, ErrnoText(errno)));
  }
  return fd;
}

absl::Status TcpLinks::Connect(const std::string& host, int port, const std::string& token) {
  const auto deadline = Now() + options_.join_timeout;
  Link& link = links_[0];
  link.where = host;
  ASSIGN_OR_RETURN(link.data, Dial(host, port, token, kData, deadline));
  ASSIGN_OR_RETURN(link.control, Dial(host, port, token, kControl, deadline));
  const std::string waiting = absl::StrCat("rank ", options_.rank, " waiting in rendezvous: ");
  // A little more than rank 0 waits: it knows who is missing.
  const auto last = deadline + kHelloTimeout;
  while (true) {
    RETURN_IF_ERROR(Abandoned("joining"));
    pollfd ready{link.data.get(), POLLIN, 0};
    char byte;
    const ssize_t n = poll(&ready, 1, int(kLook.count())) > 0 ? recv(link.data.get(), &byte, 1, 0) : -2;
    if (n == 1) return absl::OkStatus();
    if (n == 0 || (n == -1 && errno != EAGAIN && errno != EINTR)) {
      Read(&link);
      return ErrorOf(v1::REASON_PEER_LOST, absl::StrCat(waiting, verdict_.empty() ? "rank 0 has closed the connection; see its log" : verdict_));
    }
    if (Now() >= last) return ErrorOf(v1::REASON_PEER_LOST, absl::StrCat(waiting, "rank 0 at ", host, " has not answered"));
  }
}

void TcpLinks::SetActivity(const std::string& activity) {
  std::lock_guard lock(mutex_);
  activity_ = activity;
}

std::string TcpLinks::Describe(int rank) const {
  const Link& link = links_[size_t(rank)];
  std::string text = absl::StrCat("rank ", rank, " (");
  if (link.pid > 0) absl::StrAppend(&text, "pid ", link.pid, " ");
  return absl::StrCat(text, "on ", link.where, link.activity.empty() ? "" : ", at ", link.activity, ")");
}

std::string TcpLinks::Gone(int rank) const {
  std::lock_guard lock(mutex_);
  return absl::StrCat(Describe(rank), " has exited");
}

std::string TcpLinks::Loss(int rank, std::chrono::nanoseconds waited) const {
  std::lock_guard lock(mutex_);
  const Link& link = links_[size_t(rank)];
  if (link.closed) return absl::StrCat(Describe(rank), " has exited");
  const auto silent = Now() - link.seen;
  if (silent >= options_.timeout) return absl::StrCat(Describe(rank), " has shown no sign of life for ", int64_t(Seconds(silent)), " s");
  // Rank 0 knows better who is missing: the others leave it the time to say so.
  const std::chrono::nanoseconds busy = options_.rank == 0 ? options_.busy_timeout : options_.busy_timeout + options_.timeout;
  if (waited >= busy) return absl::StrCat(Describe(rank), " is alive but has not come for ", int64_t(Seconds(waited)), " s");
  return "";
}

void TcpLinks::SendVerdict(const std::string& message) {
  std::lock_guard lock(mutex_);
  for (Link& link : links_) {
    if (link.control) Send(&link, kVerdict, message);
  }
}

std::string TcpLinks::AwaitVerdict(std::chrono::nanoseconds wait) const {
  std::unique_lock lock(mutex_);
  said_.wait_for(lock, wait, [this] { return !verdict_.empty(); });
  return verdict_;
}

void TcpLinks::Run() {
  auto next_beat = Now();
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (Now() >= next_beat) {
      next_beat = Now() + kBeatEvery;
      for (Link& link : links_) {
        if (link.control && link.out.empty()) Send(&link, kBeat, activity_);
      }
    }
    std::vector<pollfd> fds = {{wake_.get(), POLLIN, 0}};
    std::vector<Link*> owners = {nullptr};
    for (Link& link : links_) {
      if (!link.control || link.closed) continue;
      fds.push_back({link.control.get(), short(POLLIN | (link.out.empty() ? 0 : POLLOUT)), 0});
      owners.push_back(&link);
    }
    const auto wait = std::max(std::chrono::nanoseconds(0), next_beat - Now());
    lock.unlock();
    poll(fds.data(), fds.size(), int(std::chrono::ceil<std::chrono::milliseconds>(wait).count()));
    lock.lock();
    for (size_t i = 1; i < fds.size(); ++i) {
      if ((fds[i].revents & POLLOUT) != 0) Flush(owners[i]);
      if ((fds[i].revents & ~POLLOUT) != 0) Read(owners[i]);
    }
  }
}

void TcpLinks::Send(Link* link, uint32_t kind, const std::string& text) {
  Message message{};
  message.kind = kind;
  message.pid = uint32_t(getpid());
  std::memcpy(message.text, text.data(), std::min(text.size(), sizeof message.text - 1));
  link->out.append(reinterpret_cast<const char*>(&message), sizeof message);
  Flush(link);
}

void TcpLinks::Flush(Link* link) {
  const ssize_t n = send(link->control.get(), link->out.data(), link->out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n > 0) link->out.erase(0, size_t(n));
}

void TcpLinks::Read(Link* link) {
  char buffer[4096];
  ssize_t n;
  while ((n = recv(link->control.get(), buffer, sizeof buffer, MSG_DONTWAIT)) > 0) {
    link->seen = Now();
    link->in.append(buffer, size_t(n));
    while (link->in.size() >= sizeof(Message)) {
      Message message;
      std::memcpy(&message, link->in.data(), sizeof message);
      link->in.erase(0, sizeof message);
      message.text[sizeof message.text - 1] = '\0';
      if (message.kind == kVerdict && options_.rank != 0) {
        verdict_ = message.text;
        said_.notify_all();
      } else if (message.kind == kBeat) {
        link->activity = message.text;
        link->pid = int(message.pid);
      }
    }
  }
  if (n == 0 || (errno != EAGAIN && errno != EINTR)) link->closed = true;
}

}  // namespace hierad
