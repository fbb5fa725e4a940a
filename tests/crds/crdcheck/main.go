// Command crdcheck runs the API server's own validation of custom resource definitions and of
// objects under them, without a server.
//
//	crdcheck CRD.yaml... < cases.json
//
// Standard input holds a list of cases {name, object, old?}; `old` makes it an update. Standard
// output gets {crds: {name: [error...]}, cases: [{name, errors, object}]}: what the server says of
// each definition, and of each object, which comes back with its defaults. Exit status 1: a file
// or the input cannot be read; wrong objects are no failure of this program.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"sigs.k8s.io/yaml"
)

// testCase is an object as a user sends it, and the stored one that it replaces.
type testCase struct {
	name        string
	object, old map[string]any
}

// verdict is what the server makes of a case: its refusals, none for a good object.
type verdict struct {
	Name   string         `json:"name"`
	Errors []string       `json:"errors"`
	Object map[string]any `json:"object"`
}

type report struct {
	CRDs  map[string][]string `json:"crds"`
	Cases []verdict           `json:"cases"`
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "crdcheck:", err)
		os.Exit(1)
	}
}

func run(paths []string) error {
	cases, err := readCases(os.Stdin)
	if err != nil {
		return fmt.Errorf("standard input: %w", err)
	}
	result := report{CRDs: map[string][]string{}, Cases: []verdict{}}
	kinds := map[string]*kind{}
	for _, path := range paths {
		crd, err := readCRD(path)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		result.CRDs[crd.Name] = definitionErrors(crd)
		if kinds[crd.Spec.Names.Kind], err = newKind(crd); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	for _, c := range cases {
		name, _ := c.object["kind"].(string)
		kind, found := kinds[name]
		if !found {
			return fmt.Errorf("case %s: no definition of kind %q", c.name, name)
		}
		errs, err := kind.judge(c.object, c.old)
		if err != nil {
			return fmt.Errorf("case %s: %w", c.name, err)
		}
		result.Cases = append(result.Cases, verdict{c.name, errs, c.object})
	}
	return json.NewEncoder(os.Stdout).Encode(result)
}

// readCases keeps whole numbers as int64, as the API server's decoder does.
func readCases(input io.Reader) ([]testCase, error) {
	text, err := io.ReadAll(input)
	if err != nil {
		return nil, err
	}
	var items []any
	if err := utiljson.Unmarshal(text, &items); err != nil {
		return nil, err
	}
	cases := []testCase{}
	for index, item := range items {
		fields, _ := item.(map[string]any)
		c := testCase{}
		c.name, _ = fields["name"].(string)
		c.object, _ = fields["object"].(map[string]any)
		c.old, _ = fields["old"].(map[string]any)
		if c.object == nil {
			return nil, fmt.Errorf("case %d has no object", index)
		}
		cases = append(cases, c)
	}
	return cases, nil
}

func readCRD(path string) (*apiextensionsv1.CustomResourceDefinition, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	crd := &apiextensionsv1.CustomResourceDefinition{}
	if err := yaml.UnmarshalStrict(text, crd); err != nil {
		return nil, err
	}
	apiextensionsv1.SetObjectDefaults_CustomResourceDefinition(crd)
	crd.Status.StoredVersions = []string{crd.Spec.Versions[0].Name}
	return crd, nil
}

// definitionErrors: structure, defaults, rules that do not compile or cost too much.
func definitionErrors(crd *apiextensionsv1.CustomResourceDefinition) []string {
	internal := &apiextensions.CustomResourceDefinition{}
	convert := apiextensionsv1.Convert_v1_CustomResourceDefinition_To_apiextensions_CustomResourceDefinition
	if err := convert(crd, internal, nil); err != nil {
		return []string{err.Error()}
	}
	found := []string{}
	for _, err := range validation.ValidateCustomResourceDefinition(context.Background(), internal) {
		found = append(found, err.Error())
	}
	return found
}
