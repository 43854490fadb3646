//! Which functions a program calls: a breakpoint at the start of each, taken away when it is hit. The program, which is
//! many threads, runs at full speed but for its first calls.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::fs::File;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::process::ExitCode;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use nix::errno::Errno;
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::WaitPidFlag;
use nix::sys::wait::WaitStatus;
use nix::sys::wait::waitpid;
use nix::unistd::Pid;
use object::Object as _;
use object::ObjectSymbol as _;
use object::SymbolKind;
use signal_hook::consts::SIGINT;
use signal_hook::consts::SIGTERM;

/// The name by which this program is called to trace; what it finds lies beside that name.
pub const NAME: &str = "traced-agent";
/// Environment variable with the path of the program to trace.
pub const PROGRAM: &str = "KEBLET_LAYOUT_PROGRAM";
/// Of files with names of functions, one a line, in the order of their first calls.
pub const EXTENSION: &str = "calls";

/// `int3`.
const BREAKPOINT: u8 = 0xcc;

/// Runs the program with our arguments and the signals that end us; returns when it has ended.
pub fn run(own: &Path) -> Result<ExitCode> {
    let program = std::env::var_os(PROGRAM).with_context(|| format!("{PROGRAM} is not set"))?;
    let functions = Functions::of(Path::new(&program))?;
    let child = start(&program)?;
    forward_signals(child)?;
    let calls = own.with_file_name(format!("{child}.{EXTENSION}"));
    let calls = File::create(&calls).with_context(|| format!("cannot create {}", calls.display()))?;
    let mut tracing = Tracing { child, base: base(child)?, functions, starts: HashMap::new(), calls };
    tracing.set_breakpoints()?;
    ptrace::cont(child, None).context("cannot let the program go on")?;
    loop {
        if let ControlFlow::Break(code) = tracing.next()? {
            return Ok(code);
        }
    }
}

/// Names by address, as linked.
struct Functions(HashMap<u64, Vec<String>>);

impl Functions {
    fn of(program: &Path) -> Result<Self> {
        let bytes = fs::read(program).with_context(|| format!("cannot read {}", program.display()))?;
        let file = object::File::parse(&*bytes).with_context(|| format!("{} is no program", program.display()))?;
        let mut functions: HashMap<u64, Vec<String>> = HashMap::new();
        for symbol in file.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text && symbol.is_definition()) {
            let name = symbol.name().context("a symbol's name is no text")?;
            functions.entry(symbol.address()).or_default().push(name.to_owned());
        }
        if functions.is_empty() {
            bail!("{} has no symbols", program.display());
        }
        Ok(Self(functions))
    }
}

/// Starts the program, stopped before its first instruction. It does not outlive us.
fn start(program: &OsString) -> Result<Pid> {
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1));
    // SAFETY: between fork and exec only one system call is made, and nothing is allocated.
    unsafe { command.pre_exec(|| ptrace::traceme().map_err(std::io::Error::from)) };
    let child = command.spawn().with_context(|| format!("cannot run {}", program.display()))?;
    let child = Pid::from_raw(i32::try_from(child.id()).context("a process id beyond all bounds")?);
    waitpid(child, None).context("cannot wait for the program's start")?;
    let threads = ptrace::Options::PTRACE_O_TRACECLONE;
    let forks = ptrace::Options::PTRACE_O_TRACEFORK | ptrace::Options::PTRACE_O_TRACEVFORK;
    ptrace::setoptions(child, threads | forks | ptrace::Options::PTRACE_O_EXITKILL).context("cannot trace")?;
    Ok(child)
}

fn forward_signals(child: Pid) -> Result<()> {
    let mut signals = signal_hook::iterator::Signals::new([SIGTERM, SIGINT]).context("cannot handle signals")?;
    std::thread::spawn(move || {
        for signal in signals.forever() {
            // It may have ended already.
            let _ = nix::sys::signal::kill(child, Signal::try_from(signal).ok());
        }
    });
    Ok(())
}

/// Where the program lies in memory.
fn base(child: Pid) -> Result<u64> {
    let path = format!("/proc/{child}/maps");
    let maps = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let start = maps.split('-').next().unwrap_or_default();
    u64::from_str_radix(start, 16).with_context(|| format!("{path} begins with no address"))
}

struct Tracing {
    child: Pid,
    base: u64,
    functions: Functions,
    /// First bytes of functions not called yet.
    starts: HashMap<u64, u8>,
    calls: File,
}

impl Tracing {
    fn set_breakpoints(&mut self) -> Result<()> {
        let memory = memory(self.child)?;
        for address in self.functions.0.keys().map(|address| self.base + address) {
            let mut start = [0];
            memory.read_exact_at(&mut start, address).context("cannot read the program")?;
            memory.write_all_at(&[BREAKPOINT], address).context("cannot change the program")?;
            self.starts.insert(address, start[0]);
        }
        Ok(())
    }

    /// Waits for one stop or end of a thread; breaks with the program's exit code when it has ended.
    fn next(&mut self) -> Result<ControlFlow<ExitCode>> {
        match waitpid(None, Some(WaitPidFlag::__WALL)) {
            Ok(WaitStatus::Exited(pid, code)) if pid == self.child => {
                return Ok(ControlFlow::Break(ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX))));
            }
            Ok(WaitStatus::Signaled(pid, ..)) if pid == self.child => return Ok(ControlFlow::Break(ExitCode::FAILURE)),
            Ok(WaitStatus::Stopped(thread, Signal::SIGTRAP)) => self.hit(thread)?,
            // A new thread begins with this one.
            Ok(WaitStatus::Stopped(thread, Signal::SIGSTOP)) => go_on(thread, None),
            Ok(WaitStatus::Stopped(thread, signal)) => go_on(thread, Some(signal)),
            Ok(WaitStatus::PtraceEvent(thread, ..)) => go_on(thread, None),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(Errno::ECHILD) => return Ok(ControlFlow::Break(ExitCode::SUCCESS)),
            Err(error) => return Err(error).context("cannot wait for the program"),
        }
        Ok(ControlFlow::Continue(()))
    }

    /// A thread has met a breakpoint: the first call of a function, here or by another thread a moment before.
    fn hit(&mut self, thread: Pid) -> Result<()> {
        let mut registers = ptrace::getregs(thread).context("cannot read registers")?;
        let address = registers.rip - 1;
        if let Some(start) = self.restored(address) {
            memory(thread)?.write_all_at(&[start], address).context("cannot change the program back")?;
            registers.rip = address;
            ptrace::setregs(thread, registers).context("cannot write registers")?;
        }
        go_on(thread, None);
        Ok(())
    }

    /// The byte that belongs there; the call is noted if it is the first one.
    fn restored(&mut self, address: u64) -> Option<u8> {
        let start = *self.starts.get(&address)?;
        // Not again when another thread, or a forked process with its own copy, gets here.
        for name in self.functions.0.remove(&(address - self.base)).into_iter().flatten() {
            // What could not be written is missing in the list, and only there.
            let _ = writeln!(self.calls, "{name}");
        }
        Some(start)
    }
}

fn memory(process: Pid) -> Result<File> {
    let path = format!("/proc/{process}/mem");
    OpenOptions::new().read(true).write(true).open(&path).with_context(|| format!("cannot open {path}"))
}

/// Lets a thread go on; one that is gone meanwhile need not.
fn go_on(thread: Pid, signal: Option<Signal>) {
    let _ = ptrace::cont(thread, signal);
}
