//! What the kernel's verifier has to follow. It gives up at a million instructions, and the start of a node waits for it.

use aya::programs::loaded_programs;
use keblet::kernel::bpf::Options;

use crate::support::TestCgroup;
use crate::support::load_with;
use crate::support::machine_lacks;

/// A tenth of the kernel's limit (`BPF_COMPLEXITY_LIMIT_INSNS`).
const MOST: u32 = 100_000;

#[tokio::test]
#[ignore = "needs root and BPF"]
async fn bpf_programs_are_verified_far_below_the_limit() {
    if machine_lacks().is_some() {
        return;
    }
    let loaded = load_with(Options::new(TestCgroup::new().hierarchy.clone())).await;
    let known: Vec<_> = loaded_programs().map(|info| info.expect("readable")).collect();
    for status in &loaded.status {
        let info = known.iter().rfind(|info| info.name_as_str() == Some(status.program)).expect(status.program);
        // Kernels before 5.16 do not count.
        let verified = info.verified_instruction_count().unwrap_or(0);
        assert!(verified < MOST, "{}: {verified} instructions", status.program);
    }
}
