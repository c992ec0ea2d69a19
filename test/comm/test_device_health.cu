// The health of a device as the driver and Linux report it, with a fake library and fake files.
// devices: cpu
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "data/run/device_health.h"
#include "test/support/file_testing.h"
#include "test/support/testing.h"

namespace {

// A fake driver whose numbers the test sets.
struct Driver {
    unsigned clock = 1980, milliwatts = 690'500, temperature = 61;
    unsigned long long reasons = 1, ecc[2] = {7, 0}, link = 2;
    std::vector<unsigned long long> xids;
    int wrong_bus = 0;
} driver;

int init() {
    return 0;
}
int by_bus(const char* bus, void** device) {
    *device = &driver;
    driver.wrong_bus += strcmp(bus, "0000:18:00.0") != 0;
    return 0;
}
int clock_of(void*, int kind, unsigned* mhz) {
    return kind == 1 ? (*mhz = driver.clock, 0) : 2;
}
int power_of(void*, unsigned* mw) {
    return *mw = driver.milliwatts, 0;
}
int temperature_of(void*, int, unsigned* c) {
    return *c = driver.temperature, 0;
}
int reasons_of(void*, unsigned long long* r) {
    return *r = driver.reasons, 0;
}
int ecc_of(void*, int kind, int, unsigned long long* n) {
    return *n = driver.ecc[kind], 0;
}
int link_of(void*, unsigned link, int kind, unsigned long long* n) {
    if (link > 0 || kind > 0) return 3;  // not supported
    return *n = driver.link, 0;
}
int make_set(void** set) {
    return *set = &driver, 0;
}
int watch(void*, unsigned long long kinds, void*) {
    return kinds == 8 ? 0 : 2;
}
struct Event {
    void* device;
    unsigned long long type, data;
    unsigned instance, compute_instance;
};
int wait_for_event(void*, Event* event, unsigned milliseconds) {
    if (milliseconds || driver.xids.empty()) return 10;  // timeout
    event->data = driver.xids.front();
    driver.xids.erase(driver.xids.begin());
    return 0;
}

void* find_all(const char* symbol) {
    const std::pair<const char*, void*> table[] = {
        {"nvmlInit_v2", (void*)init},
        {"nvmlDeviceGetHandleByPciBusId_v2", (void*)by_bus},
        {"nvmlDeviceGetClockInfo", (void*)clock_of},
        {"nvmlDeviceGetPowerUsage", (void*)power_of},
        {"nvmlDeviceGetTemperature", (void*)temperature_of},
        {"nvmlDeviceGetCurrentClocksThrottleReasons", (void*)reasons_of},
        {"nvmlDeviceGetTotalEccErrors", (void*)ecc_of},
        {"nvmlDeviceGetNvLinkErrorCounter", (void*)link_of},
        {"nvmlEventSetCreate", (void*)make_set},
        {"nvmlDeviceRegisterEvents", (void*)watch},
        {"nvmlEventSetWait_v2", (void*)wait_for_event}};
    for (auto& [name, function] : table)
        if (!strcmp(name, symbol)) return function;
    return nullptr;
}
void* find_none(const char*) {
    return nullptr;
}

void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path) << text << "\n";
}

}  // namespace

TEST_CASE("the driver's numbers are read, and errors count from the beginning of the run") {
    driver = {};
    TemporaryFolder nothing;
    DeviceHealth health("0000:18:00.0", find_all, nothing.path);
    CHECK(driver.wrong_bus == 0);
    auto first = health.read();
    CHECK(first["sm_clock_mhz"] == 1980);
    CHECK(first["power_w"] == 690.5);
    CHECK(first["temperature_c"] == 61);
    CHECK(first["throttled"] == "");  // being idle does not count
    CHECK(first["ecc_corrected"] == 0);
    CHECK(first["link_errors"] == 0);
    CHECK(first["xids"] == 0);
    CHECK(!first.contains("xid"));
    CHECK(DeviceHealth::alarm({}, first).empty());
    driver.ecc[0] = 9, driver.ecc[1] = 1, driver.link = 5, driver.xids = {48, 79}, driver.reasons = 0x24;
    auto second = health.read();
    CHECK(second["ecc_corrected"] == 2);
    CHECK(second["ecc_uncorrected"] == 1);
    CHECK(second["link_errors"] == 3);
    CHECK(second["xids"] == 2);
    CHECK(second["xid"] == 79);
    CHECK(second["throttled"] == "power cap, temperature");
    CHECK(DeviceHealth::alarm(first, second) ==
          "2 critical driver errors, the last one XID 79, 1 uncorrected memory error, 3 link errors, "
          "its clocks are throttled by power cap, temperature");
    CHECK(DeviceHealth::alarm(second, health.read()).empty());  // already reported
}

TEST_CASE("files of Linux tell of links and clocks") {
    TemporaryFolder files;
    std::string port = files / "class/infiniband/mlx5_0/ports/1/counters/";
    write(port + "symbol_error", "3");
    write(port + "link_downed", "1");
    for (int core : {0, 1}) {
        std::string at = files / text("devices/system/cpu/cpu%d/", core);
        write(at + "cpufreq/scaling_cur_freq", core ? "2000000" : "3000000");
        write(at + "thermal_throttle/package_throttle_count", "4");
        write(at + "topology/physical_package_id", "0");
    }
    write(files / "devices/system/cpu/cpufreq/none", "0");
    DeviceHealth health("", find_none, files.path);
    auto before = health.read();
    CHECK(before["link_errors"] == 0);
    CHECK(before["cpu_clock_mhz"] == 2500);
    CHECK(before["cpu_throttled"] == 0);
    write(port + "link_downed", "2");
    for (int core : {0, 1})
        write(files / text("devices/system/cpu/cpu%d/thermal_throttle/package_throttle_count", core), "5");
    auto after = health.read();
    CHECK(after["link_errors"] == 1);
    CHECK(after["cpu_throttled"] == 1);  // once for the processor: both of its cores report it
    CHECK(DeviceHealth::alarm(before, after) == "1 link error, its processor was too hot");
}

TEST_CASE("where nobody tells anything, a reading is empty") {
    TemporaryFolder nothing;
    CHECK(DeviceHealth("", find_all, nothing.path).read().empty());
    CHECK(DeviceHealth("0000:18:00.0", find_none, nothing.path).read().empty());
}
