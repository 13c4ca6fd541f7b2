// The page's files, embedded: server/web/.
#pragma once

namespace hierad {

extern const char kWebPageHtml[];
extern const char kWebPageCss[];
extern const char kWebPageJs[];

}  // namespace hierad
