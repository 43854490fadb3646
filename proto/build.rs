//! Generates the Rust side of the `.proto` files, without a system `protoc`.

const ROOTS: [&str; 2] = ["cri/v1/runtime.proto", "cri/v1/image.proto"];
/// Not among the descriptors that are compared with the published CRI.
const HEALTH: &str = "health/v1/health.proto";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=cri");
    println!("cargo::rerun-if-changed=health");
    tonic_prost_build::configure().compile_fds(protox::compile([HEALTH], ["."])?)?;
    let descriptors = protox::compile(ROOTS, ["."])?;
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), prost::Message::encode_to_vec(&descriptors))?;
    tonic_prost_build::configure()
        // Ordered maps: equal messages encode to equal bytes, and small maps cost no hashing.
        .btree_map(".")
        // Env values and command output are shared, not copied.
        .bytes(".")
        .compile_fds(descriptors)?;
    Ok(())
}
