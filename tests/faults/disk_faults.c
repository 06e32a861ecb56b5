/* Fails the n-th file operation below a folder, as a disk or kernel would. Loaded with LD_PRELOAD.
 *
 * fault_arm(folder, n, error, is_short, signal) arms it for this process: of the calls below that concern a path or
 * descriptor below `folder`, the n-th (from 1) fails with `error`; with is_short a write takes half of its bytes first,
 * and the next one fails. With a signal other than 0 the n-th call succeeds, after the process has got this signal.
 * fault_count() is the number of calls since then. An n of 0 only counts. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static atomic_long count;
static long target;
static int error_number, is_short_write, signal_number;

void fault_arm(const char *folder, long n, int error, int is_short, int signal) {
  strncpy(root, folder, sizeof root - 1);
  target = n, error_number = error, is_short_write = is_short, signal_number = signal;
  atomic_store(&count, 0);
}

long fault_count(void) { return atomic_load(&count); }

static int is_below(const char *path) {
  size_t length = strlen(root);
  return length && path && !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

static int descriptor_is_below(int descriptor) {
  char link[64], path[PATH_MAX];
  if (!root[0]) return 0;
  int saved = errno;
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, path, sizeof path - 1);
  errno = saved;
  if (length < 0) return 0;
  path[length] = 0;
  return is_below(path);
}

static int concerns(int descriptor, const char *path) {
  if (path && path[0] == '/') return is_below(path);
  return descriptor >= 0 && descriptor_is_below(descriptor);
}

/* 1: the call fails; 2: it takes half of its bytes. */
static int hits(int concerned) {
  if (!concerned) return 0;
  long number = atomic_fetch_add(&count, 1) + 1;
  if (!target) return 0;
  if (signal_number) {
    if (number == target) kill(getpid(), signal_number);
    return 0;
  }
  if (is_short_write && number == target) return 2;
  if (number != target + (is_short_write ? 1 : 0)) return 0;
  errno = error_number;
  return 1;
}

#define REAL(result, name, ...) \
  static result (*real)(__VA_ARGS__); \
  if (!real) real = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    REAL(int, name, const char *, int, ...); \
    va_list list; va_start(list, flags); mode_t mode = va_arg(list, mode_t); va_end(list); \
    return hits(concerns(-1, path)) == 1 ? -1 : real(path, flags, mode); \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
  int name(int folder, const char *path, int flags, ...) { \
    REAL(int, name, int, const char *, int, ...); \
    va_list list; va_start(list, flags); mode_t mode = va_arg(list, mode_t); va_end(list); \
    return hits(concerns(folder, path)) == 1 ? -1 : real(folder, path, flags, mode); \
  }
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int descriptor, const void *bytes, size_t length) {
  REAL(ssize_t, write, int, const void *, size_t);
  int hit = hits(descriptor_is_below(descriptor));
  return hit == 1 ? -1 : real(descriptor, bytes, hit == 2 && length > 1 ? length / 2 : length);
}

#define PWRITE(name) \
  ssize_t name(int descriptor, const void *bytes, size_t length, off_t offset) { \
    REAL(ssize_t, name, int, const void *, size_t, off_t); \
    int hit = hits(descriptor_is_below(descriptor)); \
    return hit == 1 ? -1 : real(descriptor, bytes, hit == 2 && length > 1 ? length / 2 : length, offset); \
  }
PWRITE(pwrite)
PWRITE(pwrite64)

#define DESCRIPTOR(result, name, parameters, arguments, ...) \
  result name parameters { \
    REAL(result, name, __VA_ARGS__); \
    return hits(descriptor_is_below(descriptor)) == 1 ? -1 : real arguments; \
  }
DESCRIPTOR(ssize_t, read, (int descriptor, void *bytes, size_t length), (descriptor, bytes, length), int, void *, size_t)
DESCRIPTOR(ssize_t, pread, (int descriptor, void *bytes, size_t length, off_t offset),
           (descriptor, bytes, length, offset), int, void *, size_t, off_t)
DESCRIPTOR(ssize_t, pread64, (int descriptor, void *bytes, size_t length, off_t offset),
           (descriptor, bytes, length, offset), int, void *, size_t, off_t)
DESCRIPTOR(ssize_t, writev, (int descriptor, const struct iovec *parts, int number), (descriptor, parts, number),
           int, const struct iovec *, int)
DESCRIPTOR(ssize_t, pwritev, (int descriptor, const struct iovec *parts, int number, off_t offset),
           (descriptor, parts, number, offset), int, const struct iovec *, int, off_t)
DESCRIPTOR(int, fsync, (int descriptor), (descriptor), int)
DESCRIPTOR(int, fdatasync, (int descriptor), (descriptor), int)
DESCRIPTOR(int, ftruncate, (int descriptor, off_t length), (descriptor, length), int, off_t)
DESCRIPTOR(int, ftruncate64, (int descriptor, off_t length), (descriptor, length), int, off_t)
DESCRIPTOR(int, fallocate, (int descriptor, int mode, off_t offset, off_t length), (descriptor, mode, offset, length),
           int, int, off_t, off_t)

int posix_fallocate(int descriptor, off_t offset, off_t length) {
  REAL(int, posix_fallocate, int, off_t, off_t);
  return hits(descriptor_is_below(descriptor)) == 1 ? error_number : real(descriptor, offset, length);
}

int rename(const char *from, const char *to) {
  REAL(int, rename, const char *, const char *);
  return hits(concerns(-1, to)) == 1 ? -1 : real(from, to);
}
int renameat(int from_folder, const char *from, int folder, const char *to) {
  REAL(int, renameat, int, const char *, int, const char *);
  return hits(concerns(folder, to)) == 1 ? -1 : real(from_folder, from, folder, to);
}
int link(const char *from, const char *to) {
  REAL(int, link, const char *, const char *);
  return hits(concerns(-1, to)) == 1 ? -1 : real(from, to);
}
int linkat(int from_folder, const char *from, int folder, const char *to, int flags) {
  REAL(int, linkat, int, const char *, int, const char *, int);
  return hits(concerns(folder, to)) == 1 ? -1 : real(from_folder, from, folder, to, flags);
}
int unlink(const char *path) {
  REAL(int, unlink, const char *);
  return hits(concerns(-1, path)) == 1 ? -1 : real(path);
}
int unlinkat(int folder, const char *path, int flags) {
  REAL(int, unlinkat, int, const char *, int);
  return hits(concerns(folder, path)) == 1 ? -1 : real(folder, path, flags);
}
int mkdir(const char *path, mode_t mode) {
  REAL(int, mkdir, const char *, mode_t);
  return hits(concerns(-1, path)) == 1 ? -1 : real(path, mode);
}
int rmdir(const char *path) {
  REAL(int, rmdir, const char *);
  return hits(concerns(-1, path)) == 1 ? -1 : real(path);
}
