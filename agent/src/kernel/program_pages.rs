//! Pages of the program's own code and constants, which the kernel maps from the page cache when they are used.
//!
//! It maps 64 KiB around each page that is used (fault-around, `mm/memory.c`). The agent at rest uses a few functions from
//! everywhere in the program, so that most of the program would stay resident. The kernel maps single pages where a
//! userfaultfd(2) is registered. `UFFD_FEATURE_WP_ASYNC` (Linux 6.7) allows that for pages of a file, and handles all
//! faults in the kernel: nothing waits for the program, and nothing is written to the descriptor.

use std::io;
use std::os::fd::AsRawFd as _;
use std::os::fd::FromRawFd as _;
use std::os::fd::OwnedFd;
use std::os::fd::RawFd;
use std::sync::OnceLock;

/// Smallest page size of the supported machines; the kernel refuses an address that is not aligned to its own.
const PAGE: u64 = 4096;

/// Unmaps the pages of the program's own code and constants, so that those which only the work of the past needed no
/// longer count as resident. They stay in the page cache of the kernel, which may reclaim unmapped pages first; what is
/// used again is mapped by a minor fault, from the first call on one page at a time where the kernel can.
pub fn unmap() {
    let segments = read_only_segments();
    registration(&segments);
    for segment in segments {
        segment.unmap();
    }
}

/// Kept until the program ends. A refusal is final.
fn registration(segments: &[Segment]) -> &'static io::Result<OwnedFd> {
    static REGISTRATION: OnceLock<io::Result<OwnedFd>> = OnceLock::new();
    REGISTRATION.get_or_init(|| {
        map_single_pages(segments).inspect_err(|error| {
            tracing::debug!(%error, "userfaultfd is refused: the kernel maps more of the program than is used");
        })
    })
}

/// A part of the program that is mapped from its file and never written. It stays mapped as long as the program runs.
struct Segment {
    /// Aligned to a page.
    begin: u64,
    length: u64,
}

impl Segment {
    fn unmap(&self) {
        // SAFETY: the segment is a private mapping of a file that cannot be written while it is executed. It was never
        // writable, so no page of it differs from the file, and each access after the call reads the same bytes.
        unsafe {
            libc::madvise(self.begin as *mut libc::c_void, self.length as libc::size_t, libc::MADV_DONTNEED);
        }
    }
}

fn read_only_segments() -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    // SAFETY: the callback matches the type that dl_iterate_phdr calls, takes the vector it is passed, which nothing else
    // uses until the call returns, and does not unwind.
    unsafe {
        libc::dl_iterate_phdr(Some(add_segments), (&raw mut segments).cast());
    }
    segments
}

/// Handles the first object that dl_iterate_phdr reports, which is the program itself, and ends the iteration.
unsafe extern "C" fn add_segments(
    info: *mut libc::dl_phdr_info,
    _size: libc::size_t,
    segments: *mut libc::c_void,
) -> libc::c_int {
    // SAFETY: dl_iterate_phdr passes a valid record, whose headers stay mapped as long as the program, and the vector of
    // its caller.
    let (base, headers, segments) = unsafe {
        let info = &*info;
        let headers = std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum));
        (info.dlpi_addr, headers, &mut *segments.cast::<Vec<Segment>>())
    };
    let read_only = |header: &&libc::Elf64_Phdr| header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_W == 0;
    segments.extend(headers.iter().filter(read_only).map(|header| {
        let begin = (base + header.p_vaddr) & !(PAGE - 1);
        let end = (base + header.p_vaddr + header.p_memsz).next_multiple_of(PAGE);
        Segment { begin, length: end - begin }
    }));
    1
}

/// The kernel's `struct uffdio_api`, which libc does not have.
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// The kernel's `struct uffdio_register`.
#[repr(C)]
struct Register {
    begin: u64,
    length: u64,
    mode: u64,
    ioctls: u64,
}

const USER_MODE_ONLY: libc::c_int = 1;
const API: u64 = 0xAA;
const WRITE_PROTECTION: u64 = 1 << 1;
const WRITE_PROTECTION_ASYNC: u64 = 1 << 15;
const USERFAULTFD: u8 = 0xAA;
const NEGOTIATE: libc::Ioctl = nix::request_code_readwrite!(USERFAULTFD, 0x3F, size_of::<Api>());
const REGISTER: libc::Ioctl = nix::request_code_readwrite!(USERFAULTFD, 0x00, size_of::<Register>());

/// Makes the kernel map pages of these segments one at a time. The registration ends when the descriptor is closed; child
/// processes do not inherit it.
///
/// # Errors
/// The kernel is older than Linux 6.7, is built without userfaultfd or refuses it to this process.
fn map_single_pages(segments: &[Segment]) -> io::Result<OwnedFd> {
    // SAFETY: libc has no function for this call. The kernel reads an integer.
    let opened = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | USER_MODE_ONLY) };
    if opened < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just opened this descriptor for us alone; it fits, as descriptors are small integers.
    let registration = unsafe { OwnedFd::from_raw_fd(opened as RawFd) };
    let mut api = Api { api: API, features: WRITE_PROTECTION_ASYNC, ioctls: 0 };
    // SAFETY: the descriptor is open, and the kernel reads and writes the structure whose size is in the request.
    if unsafe { libc::ioctl(registration.as_raw_fd(), NEGOTIATE, &raw mut api) } != 0 {
        return Err(io::Error::last_os_error());
    }
    for segment in segments {
        let mut range = Register { begin: segment.begin, length: segment.length, mode: WRITE_PROTECTION, ioctls: 0 };
        // SAFETY: as above. The segment is mapped and stays so, and without missing or minor faults among the modes no
        // access to it waits for a reader of the descriptor.
        if unsafe { libc::ioctl(registration.as_raw_fd(), REGISTER, &raw mut range) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(registration)
}

#[cfg(test)]
pub(crate) mod testing {
    use std::os::unix::fs::FileExt as _;
    use std::sync::Mutex;
    use std::sync::MutexGuard;
    use std::sync::PoisonError;

    use super::PAGE;

    /// So much that its middle shares no window of pages with anything else that is in use.
    static CONSTANTS: [u8; 1 << 20] = [7; 1 << 20];
    static USED: Mutex<()> = Mutex::new(());

    /// A page of constants, for one test at a time: each unmaps the whole program.
    pub(crate) struct Page(#[expect(dead_code, reason = "keeps other tests waiting")] MutexGuard<'static, ()>);

    impl Page {
        /// Waits until no other test uses it.
        pub(crate) fn new() -> Self {
            Self(USED.lock().unwrap_or_else(PoisonError::into_inner))
        }

        pub(crate) fn read(&self) -> u8 {
            std::hint::black_box(CONSTANTS[CONSTANTS.len() / 2])
        }

        pub(crate) fn is_mapped(&self) -> bool {
            Self::is_mapped_at(CONSTANTS.len() / 2)
        }

        /// Whether that after it is, which nothing has read.
        pub(crate) fn neighbour_is_mapped(&self) -> bool {
            Self::is_mapped_at(CONSTANTS.len() / 2 + PAGE as usize)
        }

        fn is_mapped_at(index: usize) -> bool {
            const ENTRY: u64 = size_of::<u64>() as u64;
            let mut entry = [0; ENTRY as usize];
            let page = (&raw const CONSTANTS[index]).addr() as u64 / PAGE;
            let pagemap = std::fs::File::open("/proc/self/pagemap").expect("the table of pages");
            pagemap.read_exact_at(&mut entry, page * ENTRY).expect("an entry");
            u64::from_ne_bytes(entry) >> 63 == 1
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::Page;
    use super::*;

    #[test]
    fn constants_are_unmapped_and_read_the_same_again() {
        let page = Page::new();
        assert_eq!(page.read(), 7);
        assert!(page.is_mapped());
        unmap();
        assert!(!page.is_mapped());
        assert_eq!(page.read(), 7);
        assert!(page.is_mapped());
    }

    #[test]
    fn what_is_used_again_is_mapped_alone() {
        if let Err(error) = registration(&read_only_segments()) {
            return keblet_skip::skip(&format!("userfaultfd: {error}"));
        }
        let page = Page::new();
        unmap();
        assert_eq!(page.read(), 7);
        assert!(page.is_mapped() && !page.neighbour_is_mapped());
    }
}
