/* libnvidia-ml.so.1 for machines without a GPU: the calls that nvidia-ml-py makes for us, answered from a text file.

   The file is `cards` beside the library (so that a process needs LD_LIBRARY_PATH and nothing else) and is read again at every call:

     count=2
     driver=550.90.07
     0.uuid=GPU-…      0.name=NVIDIA A100-SXM4-80GB   0.mem_total=85899345920   0.mem_used=0
     0.util=0          0.temp=41                      0.power_mw=61000
     0.procs=4242,4243                                pids of the compute processes, empty for none
     0.error=15                                       every call on this card answers this nvmlReturn_t (15: the GPU is lost)
     0.error.util=3                                   one metric alone answers it
     0.energy_mj=1000000                              a counter
     0.links=1,1,0                                    state of each NvLink
     0.mig=1 0.slices=2                               cut into slices, which are cards of their own at 32 + 8 × card + n: 32.uuid=MIG-… and so on
     hang=1                                           every call waits for ever, as for a driver in D state; crash=1: it ends the process

   A key that is not there answers NVML_ERROR_NOT_SUPPORTED. Without `count` there is no driver. Shapes and numbers are those of the public
   header nvml.h (nvmlReturn_t, nvmlMemory_t, nvmlUtilization_t, nvmlProcessInfo_t of the v3 call). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9 };
enum { CARDS = 96, WHOLE = 32, SLICES = 8, LINE = 4096 };

struct card { int index; };
typedef struct card *handle;
static struct card cards[CARDS];
static int initialised;

struct memory { unsigned long long total, free, used; };
struct utilisation { unsigned gpu, memory; };
struct process { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; };

/* The value of `key` in the file beside this library; 0 if there is none. */
static int look_up(const char *key, char *value, size_t room) {
  Dl_info self;
  char path[LINE], line[LINE];
  size_t length = strlen(key);
  int found = 0;
  if (!dladdr((void *)look_up, &self) || !self.dli_fname) return 0;
  snprintf(path, sizeof path, "%s", self.dli_fname);
  char *slash = strrchr(path, '/');
  snprintf(slash ? slash + 1 : path, 16, "cards");
  FILE *file = fopen(path, "r");
  if (!file) return 0;
  while (!found && fgets(line, sizeof line, file))
    if (!strncmp(line, key, length) && line[length] == '=') {
      line[strcspn(line, "\r\n")] = 0;
      snprintf(value, room, "%s", line + length + 1);
      found = 1;
    }
  fclose(file);
  return found;
}

static void misbehave(void) {
  char value[8];
  if (look_up("crash", value, sizeof value)) raise(SIGSEGV);
  while (look_up("hang", value, sizeof value)) pause();
}

/* A metric of a card as text: the card's error first, then the metric's, then its value. */
static int text_of(handle card, const char *metric, char *value, size_t room) {
  char key[96], error[32];
  misbehave();
  if (!initialised) return UNINITIALIZED;
  if (!card) return INVALID_ARGUMENT;
  snprintf(key, sizeof key, "%d.error", card->index);
  if (look_up(key, error, sizeof error)) return atoi(error);
  snprintf(key, sizeof key, "%d.error.%s", card->index, metric);
  if (look_up(key, error, sizeof error)) return atoi(error);
  snprintf(key, sizeof key, "%d.%s", card->index, metric);
  return look_up(key, value, room) ? SUCCESS : NOT_SUPPORTED;
}

static int number_of(handle card, const char *metric, unsigned long long *number) {
  char value[64];
  int answer = text_of(card, metric, value, sizeof value);
  if (answer == SUCCESS) *number = strtoull(value, NULL, 10);
  return answer;
}

static int small_number_of(handle card, const char *metric, unsigned *number) {
  unsigned long long wide = 0;
  int answer = number_of(card, metric, &wide);
  if (answer == SUCCESS) *number = (unsigned)wide;
  return answer;
}

EXPORT int nvmlInitWithFlags(unsigned flags) {
  char count[32];
  (void)flags;
  if (!look_up("count", count, sizeof count)) return DRIVER_NOT_LOADED;
  for (int i = 0; i < CARDS; i++) cards[i].index = i;
  initialised = 1;
  return SUCCESS;
}

EXPORT int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
EXPORT int nvmlShutdown(void) { return SUCCESS; }

EXPORT const char *nvmlErrorString(int answer) {
  return answer == 15 ? "GPU is lost" : answer == NOT_SUPPORTED ? "Not Supported" : answer == DRIVER_NOT_LOADED ? "Driver Not Loaded" : "Error";
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
  char value[32];
  if (!initialised) return UNINITIALIZED;
  if (!look_up("count", value, sizeof value)) return DRIVER_NOT_LOADED;
  *count = (unsigned)atoi(value);
  return SUCCESS;
}

/* A lost card already refuses its handle, as the real driver does. */
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, handle *card) {
  unsigned count = 0;
  char key[96], error[32];
  int answer = nvmlDeviceGetCount_v2(&count);
  if (answer != SUCCESS) return answer;
  if (index >= count || index >= WHOLE) return INVALID_ARGUMENT;
  snprintf(key, sizeof key, "%u.error", index);
  if (look_up(key, error, sizeof error)) return atoi(error);
  *card = &cards[index];
  return SUCCESS;
}

EXPORT int nvmlDeviceGetUUID(handle card, char *value, unsigned room) { return text_of(card, "uuid", value, room); }
EXPORT int nvmlDeviceGetName(handle card, char *value, unsigned room) { return text_of(card, "name", value, room); }

EXPORT int nvmlDeviceGetMemoryInfo(handle card, struct memory *memory) {
  int answer = number_of(card, "mem_total", &memory->total);
  if (answer == SUCCESS) answer = number_of(card, "mem_used", &memory->used);
  if (answer == SUCCESS) memory->free = memory->total - memory->used;
  return answer;
}

EXPORT int nvmlDeviceGetUtilizationRates(handle card, struct utilisation *rates) {
  rates->memory = 0;
  return small_number_of(card, "util", &rates->gpu);
}

EXPORT int nvmlDeviceGetTemperature(handle card, int sensor, unsigned *celsius) {
  (void)sensor;
  return small_number_of(card, "temp", celsius);
}

EXPORT int nvmlDeviceGetPowerUsage(handle card, unsigned *milliwatt) { return small_number_of(card, "power_mw", milliwatt); }

/* Asked with no room first: the answer then is the count. */
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(handle card, unsigned *count, struct process *found) {
  char pids[LINE], *rest;
  unsigned room = *count, number = 0;
  int answer = text_of(card, "procs", pids, sizeof pids);
  if (answer != SUCCESS) return answer;
  for (char *pid = strtok_r(pids, ",", &rest); pid; pid = strtok_r(NULL, ",", &rest), number++)
    if (found && number < room) found[number] = (struct process){(unsigned)atoi(pid), 0, 0xFFFFFFFFu, 0xFFFFFFFFu};
  *count = number;
  return number > room ? INSUFFICIENT_SIZE : SUCCESS;
}

EXPORT int nvmlSystemGetDriverVersion(char *value, unsigned room) { return look_up("driver", value, room) ? SUCCESS : NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetTotalEnergyConsumption(handle card, unsigned long long *energy) { return number_of(card, "energy_mj", energy); }

EXPORT int nvmlDeviceGetNvLinkState(handle card, unsigned link, unsigned *active) {
  char states[LINE];
  int answer = text_of(card, "links", states, sizeof states);
  if (answer != SUCCESS) return answer;
  if (2 * link >= strlen(states)) return INVALID_ARGUMENT;
  *active = states[2 * link] == '1';
  return SUCCESS;
}

EXPORT int nvmlDeviceGetMigMode(handle card, unsigned *now, unsigned *later) {
  int answer = small_number_of(card, "mig", now);
  *later = *now;
  return answer;
}

EXPORT int nvmlDeviceGetMaxMigDeviceCount(handle card, unsigned *count) { return small_number_of(card, "slices", count); }

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(handle card, unsigned index, handle *slice) {
  unsigned count = 0;
  int answer = small_number_of(card, "slices", &count);
  if (answer != SUCCESS) return answer;
  if (index >= count || index >= SLICES) return INVALID_ARGUMENT;
  if (WHOLE + SLICES * card->index + index >= CARDS) return INVALID_ARGUMENT;
  *slice = &cards[WHOLE + SLICES * card->index + index];
  return SUCCESS;
}
