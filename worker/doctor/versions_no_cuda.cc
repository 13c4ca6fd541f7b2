#include "worker/doctor/doctor.h"

namespace hierad {

LibraryVersions BuiltWith() { return {}; }

}  // namespace hierad
