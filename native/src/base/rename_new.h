// RenameNew: gives a file a name that nothing has yet. Its three ways, each for filesystems
// that don't know the one before; with the last one, something that takes the name at that
// moment is replaced. All return 0 or an errno: EEXIST if anything has the name.
#ifndef CACHESTORE_BASE_RENAME_NEW_H_
#define CACHESTORE_BASE_RENAME_NEW_H_

#include <string>

namespace cachestore {

// The one that the filesystem knows. `directory`: an open one, for `name`.
int RenameNew(const std::string& from, int directory, const std::string& name);

int RenameNewAtOnce(const std::string& from, int directory, const std::string& name);
// A second name, and then not the first any more: NFS.
int RenameNewByLink(const std::string& from, int directory, const std::string& name);
int RenameNewByLook(const std::string& from, int directory, const std::string& name);

}  // namespace cachestore

#endif  // CACHESTORE_BASE_RENAME_NEW_H_
