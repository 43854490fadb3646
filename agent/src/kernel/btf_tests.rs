//! A small hand-made encoding, malformed data, and the running kernel.

use proptest::prelude::*;

use super::*;

/// Builds the encoded form type by type.
#[derive(Default)]
struct Builder {
    types: Vec<u32>,
    strings: Vec<u8>,
}

impl Builder {
    fn name(&mut self, name: &str) -> u32 {
        if self.strings.is_empty() {
            self.strings.push(0);
        }
        if name.is_empty() {
            return 0;
        }
        let at = self.strings.len() as u32;
        self.strings.extend(name.as_bytes());
        self.strings.push(0);
        at
    }

    fn ty(&mut self, name: &str, kind: u32, vlen: u32, size_or_type: u32, rest: &[u32]) {
        let name = self.name(name);
        self.types.extend([name, kind << 24 | vlen, size_or_type]);
        self.types.extend(rest);
    }

    fn build(self) -> Vec<u8> {
        let types_len = self.types.len() as u32 * 4;
        let mut data = Vec::new();
        data.extend(MAGIC.to_ne_bytes());
        data.extend([1, 0]);
        for word in [24, 0, types_len, types_len, self.strings.len() as u32] {
            data.extend(u32::to_ne_bytes(word));
        }
        data.extend(self.types.iter().flat_map(|word| word.to_ne_bytes()));
        data.extend(self.strings);
        data
    }
}

/// 1 int; 2 `struct upid {int nr; int pad}`; 3 array of 2 of it; 4 anonymous struct with `inner`
/// at 4; 5 `struct pid { int level; anonymous at 8; upid numbers[] at 16 }`; 6 enum; 7 pointer to
/// 5; 8 prototype (pointer, pointer); 9 pointer to it; 10 typedef of 9.
fn sample() -> Vec<u8> {
    let mut builder = Builder::default();
    let [nr, inner, level, numbers] = ["nr", "inner", "level", "numbers"].map(|name| builder.name(name));
    let second = builder.name("memory_cgrp_id");
    let first = builder.name("cpu_cgrp_id");
    builder.ty("int", 1, 0, 4, &[32]);
    builder.ty("upid", 4, 2, 8, &[nr, 1, 0, first, 1, 32]);
    builder.ty("", 3, 0, 0, &[2, 1, 2]);
    builder.ty("", 4, 1, 8, &[inner, 1, 32]);
    builder.ty("pid", 4, 3, 32, &[level, 1, 0, 0, 4, 64, numbers, 3, 128]);
    builder.ty("cgroup_subsys_id", 6, 2, 4, &[first, 0, second, 3]);
    builder.ty("", 2, 0, 5, &[]);
    builder.ty("", 13, 2, 0, &[0, 7, 0, 7]);
    builder.ty("", 2, 0, 8, &[]);
    builder.ty("btf_trace_mark_victim", 8, 0, 9, &[]);
    builder.build()
}

#[test]
fn finds_members_elements_and_constants() {
    let btf = Btf::parse(sample()).expect("the sample is well formed");
    assert_eq!(btf.offset("pid.level").expect("there"), 0);
    assert_eq!(btf.offset("pid.inner").expect("in the anonymous part"), 12);
    let numbers = btf.place("pid.numbers").expect("there");
    let (first, stride) = btf.elements(numbers).expect("an array");
    assert_eq!((first.offset, stride), (16, 8));
    assert_eq!(btf.within(first, "nr").expect("there").offset, 16);
    assert!(btf.within(first, "level").is_none());
    assert!(btf.elements(first).is_none());
    assert_eq!(btf.constant("memory_cgrp_id").expect("there"), 3);
    assert!(btf.tracepoint_takes_pointer("mark_victim", 0).expect("there"));
}

#[test]
fn missing_members_are_named() {
    let btf = Btf::parse(sample()).expect("the sample is well formed");
    let text = |result: Result<u32, BtfError>| result.expect_err("missing").to_string();
    assert_eq!(text(btf.offset("pid.nope")), "the kernel has no member pid.nope");
    assert_eq!(text(btf.offset("task.pid")), "the kernel has no struct task");
    assert_eq!(text(btf.constant("x")), "the kernel has no constant x");
    assert!(btf.tracepoint_takes_pointer("mark_victim", 1).is_err());
    assert!(btf.tracepoint_takes_pointer("none", 0).is_err());
}

#[test]
fn an_unreadable_file_is_named() {
    let Err(error) = Btf::read(Path::new("/nonexistent/btf")) else {
        panic!("a file that does not exist was read");
    };
    assert_eq!(error.to_string(), "cannot read the kernel's type information /nonexistent/btf");
}

#[test]
fn every_truncation_is_an_error() {
    let whole = sample();
    for len in 0..whole.len() {
        assert!(Btf::parse(whole[..len].to_vec()).is_err(), "{len} bytes");
    }
}

#[test]
fn a_typedef_that_names_itself_ends() {
    let mut builder = Builder::default();
    let member = builder.name("x");
    builder.ty("loop", 8, 0, 1, &[]);
    // Contains itself twice: a walk along all paths would not end.
    builder.ty("nest", 4, 2, 8, &[0, 2, 0, 0, 2, 8]);
    builder.ty("holder", 4, 1, 8, &[member, 1, 0]);
    let btf = Btf::parse(builder.build()).expect("well formed");
    assert!(btf.offset("nest.x").is_err());
    assert!(btf.offset("holder.x.y").is_err());
}

proptest! {
    /// Malformed data gives a result or an error, never a panic or an endless walk.
    #[test]
    fn damage_does_no_harm(changes in proptest::collection::vec((0usize..400, any::<u8>()), 1..20)) {
        let mut data = sample();
        for (at, byte) in changes {
            let at = at % data.len();
            data[at] = byte;
        }
        if let Ok(btf) = Btf::parse(data) {
            let _ = btf.offset("pid.inner");
            let _ = btf.place("pid.numbers").map(|place| btf.elements(place));
            let _ = btf.constant("memory_cgrp_id");
            let _ = btf.tracepoint_takes_pointer("mark_victim", 0);
        }
    }

    #[test]
    fn noise_does_no_harm(noise in proptest::collection::vec(any::<u8>(), 0..200)) {
        let mut data = sample();
        data.truncate(24);
        data.extend(noise);
        if let Ok(btf) = Btf::parse(data) {
            let _ = btf.offset("pid.inner");
        }
    }
}

/// In every kernel the task's pid and thread group are adjacent.
#[test]
fn reads_the_running_kernel() {
    let path = Path::new(VMLINUX);
    if !path.exists() {
        return keblet_skip::skip(&format!("this kernel has no BTF at {VMLINUX}"));
    }
    let btf = Btf::read(path).expect("the kernel's own type information");
    let pid = btf.offset("task_struct.pid").expect("there");
    assert_eq!(btf.offset("task_struct.tgid").expect("there"), pid + 4);
    assert!(btf.constant("MM_ANONPAGES").expect("there") < 8);
}
