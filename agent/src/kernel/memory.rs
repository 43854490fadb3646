//! Settings of the allocator; returns memory that the process holds and does not need.
//!
//! glibc raises its mmap threshold when large blocks are freed (`M_MMAP_THRESHOLD` in mallopt(3)) and then keeps them. The
//! BPF loader parses the kernel's type information once (about 25 MB for a moment). With other C libraries, nothing is
//! done about freed memory.

/// Smallest page size of the supported machines; the kernel refuses an address that is not aligned to its own.
const PAGE: u64 = 4096;

/// Limits the allocator to two arenas and makes it return freed memory early. To be called before any thread is started.
pub fn limit_arenas() {
    #[cfg(target_env = "gnu")]
    {
        const TRIM_THRESHOLD: libc::c_int = 128 << 10;
        for (parameter, value) in [(libc::M_ARENA_MAX, 2), (libc::M_TRIM_THRESHOLD, TRIM_THRESHOLD)] {
            // SAFETY: mallopt reads two integers and changes the allocator's own state; no other thread exists yet.
            let accepted = unsafe { libc::mallopt(parameter, value) };
            debug_assert_eq!(accepted, 1, "mallopt({parameter}) refused {value}");
        }
    }
}

/// From now on, blocks of 128 KiB and more are returned as soon as they are freed, in the whole process.
pub fn return_large_blocks() {
    // SAFETY: sets a parameter of the allocator to its own initial value, which also stops it from growing.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 128 * 1024);
    }
}

/// Returns all free pages.
pub fn return_all() {
    // SAFETY: it only releases memory that is free already.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Unmaps the pages of the program's own code and constants, so that those which only the work of the past needed no
/// longer count as resident. They stay in the page cache of the kernel, which may reclaim unmapped pages first; what is
/// used again is mapped by a minor fault, 64 KiB at a time.
pub fn unmap_program() {
    // SAFETY: the callback matches the type that dl_iterate_phdr calls, takes no data and does not unwind.
    unsafe {
        libc::dl_iterate_phdr(Some(unmap_read_only_segments), std::ptr::null_mut());
    }
}

/// Handles the first object that dl_iterate_phdr reports, which is the program itself, and ends the iteration.
unsafe extern "C" fn unmap_read_only_segments(
    info: *mut libc::dl_phdr_info,
    _size: libc::size_t,
    _data: *mut libc::c_void,
) -> libc::c_int {
    // SAFETY: dl_iterate_phdr passes a valid record, whose headers stay mapped as long as the program.
    let (base, headers) = unsafe {
        let info = &*info;
        (info.dlpi_addr, std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)))
    };
    for header in headers.iter().filter(|header| header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_W == 0) {
        let begin = (base + header.p_vaddr) & !(PAGE - 1);
        let length = base + header.p_vaddr + header.p_memsz - begin;
        // SAFETY: the segment is a private mapping of a file that cannot be written while it is executed. It was never
        // writable, so no page of it differs from the file, and each access after the call reads the same bytes.
        unsafe {
            libc::madvise(begin as *mut libc::c_void, length as libc::size_t, libc::MADV_DONTNEED);
        }
    }
    1
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
            const ENTRY: u64 = size_of::<u64>() as u64;
            let mut entry = [0; ENTRY as usize];
            let page = (&raw const CONSTANTS[CONSTANTS.len() / 2]).addr() as u64 / PAGE;
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
        unmap_program();
        assert!(!page.is_mapped());
        assert_eq!(page.read(), 7);
        assert!(page.is_mapped());
    }
}
