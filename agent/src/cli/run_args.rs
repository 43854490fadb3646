//! The flags of `keblet run`, made from the table of flags.

use clap::Arg;
use clap::ArgAction;
use clap::ArgMatches;
use clap::Args;
use clap::Command;
use clap::FromArgMatches;
use clap::builder::NonEmptyStringValueParser;
use clap::builder::ValueParser;
use clap::error::ErrorKind;

use crate::config::FlagValues;
use crate::config::flags::FLAGS;
use crate::config::flags::Flag;
use crate::config::flags::Kind;
use crate::config::flags::Target;

/// All flags of a kubelet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunArgs {
    /// The flags given.
    pub flags: FlagValues,
    /// `--version` was given: print the version and end.
    pub version: Option<String>,
}

const VERSION: &str = "version";

impl Args for RunArgs {
    fn augment_args(command: Command) -> Command {
        let version = Arg::new(VERSION)
            .long(VERSION)
            .value_name("true|false|raw|vX.Y.Z")
            .num_args(0..=1)
            .require_equals(true)
            .default_missing_value("true")
            .value_parser(NonEmptyStringValueParser::new())
            .help("Print the Kubernetes version and end");
        command.args(FLAGS.iter().map(argument)).arg(version)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

fn argument(flag: &'static Flag) -> Arg {
    let mut argument = Arg::new(flag.name)
        .long(flag.name)
        .value_name(flag.kind.placeholder())
        .action(ArgAction::Append)
        .value_parser(ValueParser::string())
        .help(flag.help())
        .help_heading(heading(flag))
        .hide_short_help(flag.deprecated);
    argument = match flag.kind {
        Kind::Bool => argument.num_args(0..=1).require_equals(true).default_missing_value("true"),
        _ => argument.num_args(1).allow_hyphen_values(true),
    };
    match flag.name {
        "v" => argument.short('v'),
        "logging-format" => argument.visible_alias("log-format"),
        _ => argument,
    }
}

fn heading(flag: &Flag) -> &'static str {
    match (flag.target, flag.deprecated) {
        (Target::Own | Target::Field(_), false) => "Flags",
        (Target::Own, true) => "Deprecated flags",
        (Target::Field(_), true) => "Flags better set in the configuration file",
        (Target::Nothing, _) => "Flags without effect",
    }
}

impl FromArgMatches for RunArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut args = Self::default();
        args.update_from_arg_matches(matches)?;
        Ok(args)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for flag in FLAGS {
            for text in matches.get_many::<String>(flag.name).into_iter().flatten() {
                self.flags.push(flag, text);
            }
        }
        // Invalid values of flags are reported as errors of the command line, before any file is read.
        self.flags.values().map_err(|error| clap::Error::raw(ErrorKind::InvalidValue, format!("{error}\n")))?;
        self.version = match matches.get_one::<String>(VERSION).map(String::as_str) {
            None | Some("false") => None,
            Some("true" | "raw") => Some(super::version::KUBERNETES.to_owned()),
            Some(version) if is_version(version) => Some(version.to_owned()),
            Some(other) => {
                let problem =
                    format!("--version: {other:?} is neither true, false, raw nor a version such as v1.36.3\n");
                return Err(clap::Error::raw(ErrorKind::InvalidValue, problem));
            }
        };
        Ok(())
    }
}

fn is_version(text: &str) -> bool {
    let numbers = text.strip_prefix('v').unwrap_or_default();
    let numbers = numbers.split(['-', '+']).next().unwrap_or_default();
    numbers.split('.').count() == 3 && numbers.split('.').all(|number| number.parse::<u32>().is_ok())
}
