//! temporary
use clap::Parser;
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    pleg: keblet::bench::PlegArgs,
}
#[tokio::main]
async fn main() -> anyhow::Result<()> {
    keblet::bench::run_pleg(Cli::parse().pleg).await
}
