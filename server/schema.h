// The text of schema.sql, embedded at build time.
#pragma once

namespace hierad {

extern const char kSchemaSql[];

}  // namespace hierad
