#include "base/channel/certificates.h"

#include <sys/stat.h>

#include "absl/strings/str_cat.h"
#include "base/fs.h"
#include "base/status.h"

namespace hierad {
namespace {

constexpr int64_t kPemBytes = 256 << 10;   // a chain of some certificates, many times over

absl::StatusOr<std::string> ReadPem(const std::string& path) {
  ASSIGN_OR_RETURN(std::string text, ReadFile(path, kPemBytes));
  if (text.find("-----BEGIN ") == std::string::npos) {
    return absl::FailedPreconditionError(absl::StrCat("certificates: \"", Printable(path), "\" is no PEM file; deploy/certs makes such files"));
  }
  return text;
}

}  // namespace

absl::StatusOr<v1::Certificates> ReadCertificates(const std::string& folder) {
  v1::Certificates certificates;
  ASSIGN_OR_RETURN(*certificates.mutable_ca(), ReadPem(JoinPath(folder, kCaFile)));
  ASSIGN_OR_RETURN(*certificates.mutable_certificate(), ReadPem(JoinPath(folder, kCertificateFile)));
  const std::string key = JoinPath(folder, kKeyFile);
  struct stat info;
  if (stat(key.c_str(), &info) == 0 && (info.st_mode & 07) != 0) {
    return absl::FailedPreconditionError(absl::StrCat("certificates: the key \"", Printable(key), "\" may be read by everyone; chmod 600 it, "
                                                      "and make a new one if others are on this machine"));
  }
  ASSIGN_OR_RETURN(*certificates.mutable_key(), ReadPem(key));
  return certificates;
}

}  // namespace hierad
