/* Writes to a log what a power cut could undo: which files were written and synced, and which names were made in which
 * folders. Loaded with LD_PRELOAD; POWER_CUT_ROOT is the folder that is watched, POWER_CUT_LOG the log. Its lines:
 *
 *   w INODE         bytes were written to a file     s INODE   a file, or the names in a folder, were synced
 *   n INODE PATH    PATH is being made in the folder with this inode     x INODE PATH   it was not made
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(result, name, ...) \
  static result (*real)(__VA_ARGS__); \
  if (!real) real = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

static ssize_t real_write(int descriptor, const void *bytes, size_t length) {
  REAL(ssize_t, write, int, const void *, size_t);
  return real(descriptor, bytes, length);
}

static void note(const char *line) {
  static int log = -1;
  int saved = errno;
  if (log < 0) {
    REAL(int, open, const char *, int, ...);
    log = real(getenv("POWER_CUT_LOG"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  }
  real_write(log, line, strlen(line)); /* one call with O_APPEND: lines of several processes do not mix */
  errno = saved;
}

static int is_below(const char *path) {
  const char *root = getenv("POWER_CUT_ROOT");
  size_t length = root ? strlen(root) : 0;
  return length && path && !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

static void note_descriptor(char kind, int descriptor) {
  char link[64], path[PATH_MAX], line[64];
  struct stat found;
  int saved = errno;
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length > 0) {
    path[length] = 0;
    if (is_below(path) && !fstat(descriptor, &found)) {
      snprintf(line, sizeof line, "%c %lu\n", kind, found.st_ino);
      note(line);
    }
  }
  errno = saved;
}

static void note_path(char kind, const char *path) {
  char folder[PATH_MAX], line[PATH_MAX + 64];
  struct stat found;
  int saved = errno;
  strncpy(folder, path, sizeof folder - 1), folder[sizeof folder - 1] = 0;
  if (!stat(dirname(folder), &found)) {
    snprintf(line, sizeof line, "%c %lu %s\n", kind, found.st_ino, path);
    note(line);
  }
  errno = saved;
}

/* Note the name before it is made, so that no other process syncs it earlier. A name that exists is as synced as it was. */
static int note_new(const char *path) {
  int saved = errno, is_new = is_below(path) && access(path, F_OK);
  errno = saved;
  if (is_new) note_path('n', path);
  return is_new;
}

static int made(int result, int is_noted, const char *path) {
  if (result < 0 && is_noted) note_path('x', path);
  return result;
}

#define WRITER(name, parameters, arguments, ...) \
  ssize_t name parameters { \
    REAL(ssize_t, name, __VA_ARGS__); \
    note_descriptor('w', descriptor); /* before: the process may be killed between the two */ \
    return real arguments; \
  }
WRITER(write, (int descriptor, const void *bytes, size_t length), (descriptor, bytes, length), int, const void *, size_t)
WRITER(pwrite, (int descriptor, const void *bytes, size_t length, off_t offset), (descriptor, bytes, length, offset), int,
       const void *, size_t, off_t)
WRITER(pwrite64, (int descriptor, const void *bytes, size_t length, off_t offset), (descriptor, bytes, length, offset),
       int, const void *, size_t, off_t)
WRITER(writev, (int descriptor, const struct iovec *parts, int number), (descriptor, parts, number), int,
       const struct iovec *, int)

#define SYNC(name) \
  int name(int descriptor) { \
    REAL(int, name, int); \
    int result = real(descriptor); \
    if (!result) note_descriptor('s', descriptor); /* after: only then the disk has it */ \
    return result; \
  }
SYNC(fsync)
SYNC(fdatasync)

#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    REAL(int, name, const char *, int, ...); \
    va_list list; va_start(list, flags); mode_t mode = va_arg(list, mode_t); va_end(list); \
    int is_noted = flags & O_CREAT && note_new(path); \
    return made(real(path, flags, mode), is_noted, path); \
  }
OPEN(open)
OPEN(open64)

int rename(const char *from, const char *to) {
  REAL(int, rename, const char *, const char *);
  int is_noted = note_new(to); /* that a replaced file comes back is not simulated */
  return made(real(from, to), is_noted, to);
}
int link(const char *from, const char *to) {
  REAL(int, link, const char *, const char *);
  int is_noted = note_new(to);
  return made(real(from, to), is_noted, to);
}
int linkat(int from_folder, const char *from, int folder, const char *to, int flags) {
  REAL(int, linkat, int, const char *, int, const char *, int);
  int is_noted = to[0] == '/' && note_new(to);
  return made(real(from_folder, from, folder, to, flags), is_noted, to);
}
int mkdir(const char *path, mode_t mode) {
  REAL(int, mkdir, const char *, mode_t);
  int is_noted = note_new(path);
  return made(real(path, mode), is_noted, path);
}
