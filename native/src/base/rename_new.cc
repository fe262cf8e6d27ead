#include "base/rename_new.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

namespace cachestore {

int RenameNew(const std::string& from, int directory, const std::string& name) {
  int error = RenameNewAtOnce(from, directory, name);
  if (error != EINVAL && error != ENOSYS && error != EOPNOTSUPP) return error;
  error = RenameNewByLink(from, directory, name);
  if (error == 0 || error == EEXIST || error == ENOENT) return error;
  // No links there, or not from one directory to another. If it is something else, the
  // rename has it too.
  return RenameNewByLook(from, directory, name);
}

int RenameNewAtOnce(const std::string& from, int directory, const std::string& name) {
  const int moved = renameat2(AT_FDCWD, from.c_str(), directory, name.c_str(), RENAME_NOREPLACE);
  return moved == 0 ? 0 : errno;
}

int RenameNewByLink(const std::string& from, int directory, const std::string& name) {
  if (linkat(AT_FDCWD, from.c_str(), directory, name.c_str(), 0) != 0) return errno;
  // It is there: a first name that stays is no failure.
  (void)unlink(from.c_str());
  return 0;
}

int RenameNewByLook(const std::string& from, int directory, const std::string& name) {
  struct stat st;
  if (fstatat(directory, name.c_str(), &st, AT_SYMLINK_NOFOLLOW) == 0) return EEXIST;
  if (errno != ENOENT) return errno;
  return renameat(AT_FDCWD, from.c_str(), directory, name.c_str()) == 0 ? 0 : errno;
}

}  // namespace cachestore
