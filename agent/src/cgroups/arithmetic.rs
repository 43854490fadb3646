//! Conversions between Kubernetes amounts and cgroup values, with integer division as in the kubelet, and of the kernel's
//! counters. Pure.

/// Lowest valid `cpu.shares`.
pub const MIN_SHARES: u64 = 2;
/// Highest valid `cpu.shares`.
pub const MAX_SHARES: u64 = 262_144;
/// Lowest valid quota, in microseconds per period.
const MIN_QUOTA: i64 = 1000;
/// CFS period where none is configured, microseconds.
pub const DEFAULT_CFS_PERIOD: u64 = 100_000;

/// cpu.shares of a request in thousandths of a cpu.
pub fn shares(milli_cpu: i64) -> u64 {
    let milli = u64::try_from(milli_cpu).unwrap_or(0);
    (milli.saturating_mul(1024) / 1000).clamp(MIN_SHARES, MAX_SHARES)
}

/// Thousandths of a cpu of cpu.shares, rounded up as [`shares`] rounds down.
pub fn milli_cpu(shares: u64) -> i64 {
    if shares < MIN_SHARES {
        return 0;
    }
    i64::try_from(shares.saturating_mul(1000).div_ceil(1024)).unwrap_or(i64::MAX)
}

/// `cpu.weight` (v2) of `cpu.shares` (v1), by the formula of KEP-2254.
pub fn weight(shares: u64) -> u64 {
    if shares >= MAX_SHARES {
        return 10_000;
    }
    1 + (shares.saturating_sub(2) * 9999) / 262_142
}

/// cpu.shares of a cpu.weight.
pub fn shares_of_weight(weight: u64) -> u64 {
    (weight.saturating_sub(1) * 262_142) / 9999 + 2
}

/// Microseconds per period of a limit in thousandths of a cpu; 0 means no limit.
pub fn quota(milli_cpu: i64, period: u64) -> i64 {
    if milli_cpu <= 0 {
        return 0;
    }
    let period = i64::try_from(period).unwrap_or(i64::MAX);
    (milli_cpu.saturating_mul(period) / 1000).max(MIN_QUOTA)
}

/// Size of a page of this machine, bytes: the kernel rounds memory limits down to it.
pub fn page_size() -> u64 {
    let size = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten();
    size.and_then(|size| u64::try_from(size).ok()).unwrap_or(4096)
}

/// Name of a huge page size in file names and on the runtime interface: `2MB`, `1GB`.
pub fn page_size_name(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KB", "MB", "GB", "TB"];
    let mut size = bytes;
    let mut unit = 0;
    while size >= 1024 && size.is_multiple_of(1024) && unit + 1 < UNITS.len() {
        size /= 1024;
        unit += 1;
    }
    format!("{size}{}", UNITS[unit])
}

/// A quota as systemd stores it: microseconds per second, rounded up to whole percents of a cpu.
pub fn systemd_quota_per_second(quota: i64, period: u64) -> u64 {
    const PERCENT: u64 = 10_000;
    let Ok(quota) = u64::try_from(quota) else { return u64::MAX };
    if quota == 0 || period == 0 {
        return u64::MAX;
    }
    (quota.saturating_mul(1_000_000) / period).div_ceil(PERCENT) * PERCENT
}

/// A list of CPUs such as `0-3,8` as systemd takes it: one bit per CPU, lowest first. `None` for a text that is no list.
pub fn cpu_mask(list: &str) -> Option<Vec<u8>> {
    const MOST: usize = 8192;
    let mut mask = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if first > last || last >= MOST {
            return None;
        }
        mask.resize(mask.len().max(last / 8 + 1), 0);
        for cpu in first..=last {
            mask[cpu / 8] |= 1 << (cpu % 8);
        }
    }
    Some(mask)
}

/// Processes that were killed at least, of `kills` counted ones, if the kernel has killed `groups` cgroups as a whole
/// (`memory.oom.group`). It counts the process that it chose twice, except if that has ended before it comes to it again;
/// one process of each group is counted in any case.
pub fn oom_kills(kills: u64, groups: u64) -> u64 {
    kills.saturating_sub(groups).max(groups.min(kills))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn table() {
        assert_eq!([0, 1, 2, 100, 1000, 2000].map(shares), [2, 2, 2, 102, 1024, 2048]);
        assert_eq!(shares(i64::MAX), 262_144);
        assert_eq!(shares(-5), 2);
        assert_eq!([0, 1, 2, 102, 306, 1024].map(milli_cpu), [0, 0, 2, 100, 299, 1000]);
        assert_eq!([2, 102, 1024, 262_143, 262_144].map(weight), [1, 4, 39, 9999, 10_000]);
        assert_eq!([0, 1, 39, 100, 10_000].map(shares_of_weight), [2, 2, 998, 2597, 262_144]);
        assert_eq!([0, 1, 5, 10, 500, 2000].map(|m| quota(m, 100_000)), [0, 1000, 1000, 1000, 50_000, 200_000]);
        assert_eq!(quota(500, 10_000), 5000);
        assert_eq!([2 << 20, 1 << 30, 64 << 10, 512 << 20].map(page_size_name), ["2MB", "1GB", "64KB", "512MB"]);
        assert_eq!(systemd_quota_per_second(50_000, 100_000), 500_000);
        assert_eq!(systemd_quota_per_second(1_234, 100_000), 20_000);
        assert_eq!(systemd_quota_per_second(-1, 100_000), u64::MAX);
        assert_eq!(cpu_mask("0-1"), Some(vec![0b11]));
        assert_eq!(cpu_mask("0,9-10"), Some(vec![1, 0b110]));
        assert_eq!(["", "x", "3-1", "0-99999"].map(cpu_mask), [const { None }; 4]);
        // Three processes, of which one is counted twice. The group of a cgroup above has none here.
        assert_eq!([oom_kills(4, 1), oom_kills(0, 1), oom_kills(3, 0)], [3, 0, 3]);
    }

    proptest! {
        #[test]
        fn shares_are_converted_back(milli in 2i64..256_000) {
            prop_assert_eq!(milli_cpu(shares(milli)), milli);
        }

        #[test]
        fn conversions_are_monotonic(a in 0i64..1_000_000, b in 0i64..1_000_000) {
            let (less, more) = (a.min(b), a.max(b));
            prop_assert!(shares(less) <= shares(more));
            prop_assert!(weight(shares(less)) <= weight(shares(more)));
            prop_assert!(quota(less, 100_000) <= quota(more, 100_000));
            prop_assert!((1..=10_000).contains(&weight(shares(a))));
        }
    }
}
