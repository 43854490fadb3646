//! Thrashes: pages of a file that were just evicted from memory are needed again, because the file is larger than the
//! memory that is left. Needs no swap.

use std::fs::File;
use std::io::Read as _;
use std::num::NonZeroUsize;
use std::path::Path;

use nix::sys::mman::MapFlags;
use nix::sys::mman::ProtFlags;
use nix::sys::mman::mmap;

use crate::process;
use crate::random::Random;

/// Memory is touched, and the file read for the first time, in steps of so many bytes.
const STEP: usize = 8 << 20;
const PAGE: usize = 4096;
/// Threads that need pages at the same time: most of them wait, as those of a server that no longer fits in memory.
const READERS: u64 = 8;
const STACK: usize = 64 << 10;

/// Touches memory until `leave` MiB are available on the machine, reads the file once, then needs its pages in random
/// order by several threads until SIGTERM, each by a page fault as code of programs is.
///
/// # Errors
/// The file cannot be read or mapped or has no page, the memory cannot be reserved, a thread cannot be started, or signals cannot be read.
pub(crate) fn thrash(path: &Path, leave: u64) -> Result<u8, String> {
    let cannot = |what: &str, error: &dyn std::fmt::Display| format!("cannot {what} {}: {error}", path.display());
    let mut file = File::open(path).map_err(|error| cannot("open", &error))?;
    let size = file.metadata().map_err(|error| cannot("measure", &error))?.len() as usize;
    let pages = size / PAGE;
    let Some(length) = NonZeroUsize::new(pages * PAGE) else {
        return Err(format!("{} is smaller than a page", path.display()));
    };
    // SAFETY: the mapping is new, at an address that the kernel chooses, and is never unmapped.
    let mapped = unsafe { mmap(None, length, ProtFlags::PROT_READ, MapFlags::MAP_SHARED, &file, 0) };
    let mapped = mapped.map_err(|errno| cannot("map", &errno))?.cast::<u8>();
    let held = fill(leave)?;
    println!("{} MiB touched, {pages} pages follow", held.len() * (STEP >> 20));
    // In order, which fills the memory that is left soon.
    let mut buffer = vec![0; STEP];
    while file.read(&mut buffer).map_err(|error| cannot("read", &error))? > 0 {}
    for reader in 0..READERS {
        let pages = Pages { first: mapped.as_ptr() as usize, count: pages };
        std::thread::Builder::new()
            .stack_size(STACK)
            .spawn(move || pages.read_forever(Random::new(reader + 1)))
            .map_err(|error| format!("cannot start a thread: {error}"))?;
    }
    process::run_until_signal(None)?;
    std::hint::black_box(&held);
    Ok(0)
}

/// The pages of the file, mapped for as long as the process runs.
struct Pages {
    /// Address of the first.
    first: usize,
    count: usize,
}

impl Pages {
    fn read_forever(self, mut random: Random) {
        loop {
            let page = random.below(self.count);
            // SAFETY: it is within the mapping, which is never unmapped, and the file keeps its length.
            std::hint::black_box(unsafe { ((self.first + page * PAGE) as *const u8).read_volatile() });
        }
    }
}

/// Touches memory until so many MiB are left.
fn fill(leave: u64) -> Result<Vec<Vec<u8>>, String> {
    let mut held: Vec<Vec<u8>> = Vec::new();
    while available()? > leave {
        let mut memory = Vec::new();
        memory.try_reserve_exact(STEP).map_err(|error| format!("cannot reserve {STEP} bytes: {error}"))?;
        // Not zero: the allocator can return zeroed pages without touching them.
        memory.resize(STEP, 1);
        std::hint::black_box(&memory);
        held.push(memory);
    }
    Ok(held)
}

/// Memory that is available without evicting what is in use, in MiB.
fn available() -> Result<u64, String> {
    let path = "/proc/meminfo";
    let text = std::fs::read_to_string(path).map_err(|error| format!("cannot read {path}: {error}"))?;
    parse_available(&text).ok_or_else(|| format!("{path} has no usable MemAvailable"))
}

fn parse_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? >> 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_that_is_left_is_read() {
        assert_eq!(parse_available("MemFree: 5 kB\nMemAvailable:    204800 kB\n"), Some(200));
        assert_eq!(parse_available("MemFree: 5 kB\n"), None);
    }

    #[test]
    fn a_file_without_a_page_is_an_error() {
        let path = std::env::temp_dir().join(format!("probe-thrash-{}", std::process::id()));
        std::fs::write(&path, "short").unwrap();
        let result = thrash(&path, 0);
        std::fs::remove_file(&path).unwrap();
        assert!(result.unwrap_err().contains("smaller than a page"));
    }
}
